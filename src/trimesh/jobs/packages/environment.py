"""An environment of a host: one folder for each content, made once for all jobs of a user.

    ~/.cache/trimesh/environments/<digest>/           as venv or uv make it
                                  <digest>/whole      where its packages are; written last
                                  <digest>.lock       held shared by who uses it, alone by who makes or removes it

EP-1 An environment is used once it is whole. One that is not, and is locked by none, is what a killed job has left: it
     is made anew.
EP-2 It is made where it is used, as its programs name their interpreter by its whole path.
EP-3 What is removed was not used for `limits.ENVIRONMENT_KEPT_SECONDS`, and is locked by none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from trimesh.jobs.code.user_cache import LockedByFile, cache_folder, make_own_folder

_WHOLE: Final = "whole"
_LOCK: Final = ".lock"


def environments_folder() -> Path:
    """Return the folder of this user, made where it is not there: `$XDG_CACHE_HOME/trimesh/environments`.

    Raises:
        OSError: See `make_own_folder`.
    """
    place = cache_folder("environments")
    make_own_folder(place)
    return place


def environment_name(digest: str) -> str:
    """Return the name of the environment of requirements, of this interpreter, on this kind of machine."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    host = (sys.version, base, platform.machine(), "-".join(platform.libc_ver()))
    return hashlib.sha256(msgspec.json.encode((digest, host))).hexdigest()[:40]


class Environment(LockedByFile):
    """One environment. Its methods read and write files; what takes long is run in a thread.

    It is locked shared by who uses it, alone by who makes or removes it.

    Args:
        folder: Of all of them.
        name: See `environment_name`.

    Attributes:
        place: Of it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / f"{name}{_LOCK}")
        self.place = folder / name

    @property
    def paths(self) -> tuple[str, ...] | None:
        """Where its packages are, entries of `sys.path`; None where it is not whole."""
        try:
            return msgspec.json.decode((self.place / _WHOLE).read_bytes(), type=tuple[str, ...])
        except (OSError, msgspec.DecodeError):
            return None

    def begin(self) -> None:
        """Remove what is there, to make it anew; locked alone."""
        shutil.rmtree(self.place, ignore_errors=True)

    def finish(self, paths: tuple[str, ...]) -> None:
        """Note that it is whole."""
        draft = self.place / f"{_WHOLE}.draft"
        draft.write_bytes(msgspec.json.encode(paths))
        draft.rename(self.place / _WHOLE)

    def touch(self) -> None:
        """Note that it is in use."""
        os.utime(self.place / _WHOLE)

    def _remove_unused(self, before: float) -> None:
        if not self.lock_alone():
            return
        try:
            used = (self.place / _WHOLE).stat().st_mtime
        except OSError:
            used = 0.0
        if used < before:
            shutil.rmtree(self.place, ignore_errors=True)
            self._lock_place.unlink(missing_ok=True)


def prune(folder: Path, kept_seconds: float) -> None:
    """Remove environments that were not in use for so long, and what killed jobs have left of some."""
    before = time.time() - kept_seconds
    for lock in folder.glob(f"*{_LOCK}"):
        one = Environment(folder, lock.name.removesuffix(_LOCK))
        with suppress(OSError):
            one._remove_unused(before)  # noqa: SLF001 - of this file
        one.close()
