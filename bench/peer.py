"""The peers, each in a virtual environment of its own: they and trimesh need not agree on any dependency."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A library that is measured beside trimesh.

    Attributes:
        requirements: What its environment gets, at exact versions. numpy is for the payloads.
        module: What can be imported when it is there.
    """

    requirements: tuple[str, ...]
    module: str


PEERS = {
    "monarch": Peer(("torchmonarch==0.7.0", "torch==2.13.0", "numpy==2.4.6"), "monarch.actor"),
    "ray": Peer(("ray[serve]==2.60.0", "numpy==2.4.6"), "ray"),
    "xoscar": Peer(("xoscar==0.12.2", "numpy==2.4.6"), "xoscar"),
}


class PeerError(Exception):
    """A peer cannot be used here; the text says why."""


def peer_python(name: str, folder: Path, *, install: bool) -> Path:
    """Return the interpreter that has a peer.

    Args:
        name: Of the peer.
        folder: Of the virtual environment; kept for the next run.
        install: Make the environment when it is not there.

    Raises:
        PeerError: It is not there, or cannot be made.
    """
    peer = PEERS[name]
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(peer.requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not install:
        raise PeerError("it is not installed (a full run installs it)")
    print(f"installing {' '.join(peer.requirements)} into {folder} ...", flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", folder],
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *peer.requirements],
        [python, "-c", f"import {peer.module}"],
    ):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
            raise PeerError(lines[-1])
    stamp.write_text(wanted)
    return python
