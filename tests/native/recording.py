"""The stand-in of libucp (`recording_ucp.c`), built when it is first asked for, and what it was asked."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimesh.config import reread

SOURCE = Path(__file__).with_name("recording_ucp.c")
ROOT = SOURCE.parents[2]

_FIELD = re.compile(r"(\w+)=(\S+)")


def build() -> Path:
    """Return where the stand-in is, built from its source as that is now."""
    folder = ROOT / ".cache" / "recording"
    library = folder / f"libucp-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{os.getpid()}.so"
        caches = {
            "ZIG_LOCAL_CACHE_DIR": str(ROOT / ".zig-cache"),
            "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".zig-cache/global"),
        }
        compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O2", "-fvisibility=hidden"]
        subprocess.run([*compiler, str(SOURCE), "-o", str(made)], check=True, env=caches | dict(os.environ))
        made.replace(library)
    return library


class Recording:
    """The stand-in as the movers of one test find it.

    Attributes:
        environment: What makes a process, and those that it starts, find it.
        held: While this file is there, no transfer of more than 256 bytes ends.
    """

    def __init__(self, folder: Path) -> None:
        self.log = folder / "calls"
        self.held = folder / "held"
        self.environment = {
            "TRIMESH_UCX": str(build()),
            "RECORDING_UCP_LOG": str(self.log),
            "RECORDING_UCP_CUDA": "1",
            "RECORDING_UCP_HOLD": str(self.held),
        }

    def install(self, monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
        """Have the movers that this process makes from now on find it; `changes` are of the environment."""
        for name, value in (self.environment | changes).items():
            monkeypatch.setenv(name, value)

    def uninstall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Undo what a test has patched, and have the settings of this process be those of its environment again."""
        monkeypatch.undo()
        reread()

    def calls(self, name: str) -> list[dict[str, int]]:
        """Return the calls of a function so far, with their arguments by name."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        asked = (line.split(" ", 1) for line in lines)
        return [{key: int(value, 0) for key, value in _FIELD.findall(rest)} for said, rest in asked if said == name]

    def forget(self) -> None:
        """Begin the log anew."""
        self.log.unlink(missing_ok=True)
