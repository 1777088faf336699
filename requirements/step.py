"""Runs one step of the set-up and prints one line: what it does, how much a folder grew, how long it took.

    step.py WHAT FOLDER COMMAND...

The output of the command is shown only if it fails. The exit status is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

WHAT_CHARS = 64
"""Width of the first column; longer texts push the others to the right."""


def size_of(folder: str) -> int:
    """Return the bytes of all files below a folder, 0 if it does not exist."""
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)


def main(what: str, folder: str, *command: str) -> int:
    """Run the command; return its exit status."""
    print(f"{what} ".ljust(WHAT_CHARS, "."), end=" ", flush=True)
    started, before = time.monotonic(), size_of(folder)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds, grown = time.monotonic() - started, size_of(folder) - before
    print(f"{max(grown, 0) / (1 << 20):5.0f} MiB {seconds:4.0f} s" if not done.returncode else "failed", flush=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
