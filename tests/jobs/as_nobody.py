"""Another user of the machine, who tries what is named on standard input: prints what it could do.

as_nobody.py    standard input: one path a line; a file is read, a folder listed, a socket dialled
"""

from __future__ import annotations

import os
import socket
import stat
import sys

NOBODY = 65534


def try_path(path: str) -> None:
    """Read, list or dial it.

    Raises:
        OSError: It cannot be done.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dialled:
            dialled.connect(path)
    elif stat.S_ISDIR(mode):
        os.listdir(path)
    else:
        with open(path, "rb") as file:
            file.read(1)


def main() -> None:
    """Become nobody, and try each."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for path in sys.stdin.read().splitlines():
        try:
            try_path(path)
        except OSError:
            continue
        print(path)


if __name__ == "__main__":
    main()
