"""The peers, each in a virtual environment of its own: they and trimesh need not agree on any dependency."""

from __future__ import annotations

import site
import subprocess
import sys
from collections.abc import Sequence
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
    return _python(PEERS[name], folder, install=install, beside=())


def own_python(requirements: tuple[str, ...], folder: Path, *, install: bool) -> Path:
    """Return an interpreter that has trimesh, all else that this one has, and what a workload of ours needs besides.

    Raises:
        PeerError: It is not there, or cannot be made.
    """
    return _python(Peer(requirements, "trimesh"), folder, install=install, beside=site.getsitepackages())


def _python(peer: Peer, folder: Path, *, install: bool, beside: Sequence[str]) -> Path:
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(peer.requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not install:
        raise PeerError("it is not installed (a full run installs it)")
    print(f"installing {' '.join(peer.requirements)} into {folder} ...", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", folder])
    if beside:
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "beside.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in beside))
    _run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *peer.requirements])
    _run([python, "-c", f"import {peer.module}"])
    stamp.write_text(wanted)
    return python


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise PeerError(lines[-1])
