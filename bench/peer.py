"""The peer, torchmonarch, in a virtual environment of its own: it and trimesh need not agree on any dependency."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ["torchmonarch==0.7.0", "torch==2.13.0"]


class PeerError(Exception):
    """The peer cannot be used here; the text says why."""


def peer_python(folder: Path, *, install: bool) -> Path:
    """Return the interpreter that has the peer.

    Args:
        folder: Of the virtual environment; kept for the next run.
        install: Make the environment when it is not there.

    Raises:
        PeerError: It is not there, or cannot be made.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(REQUIREMENTS)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not install:
        raise PeerError("it is not installed (a full run installs it)")
    print(f"installing {' '.join(REQUIREMENTS)} into {folder} ...", flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", folder],
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *REQUIREMENTS],
        [python, "-c", "import monarch.actor"],
    ):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
            raise PeerError(lines[-1])
    stamp.write_text(wanted)
    return python
