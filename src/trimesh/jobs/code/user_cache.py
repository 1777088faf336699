"""Folders in the cache of this user that jobs keep code in, and locks for what is there: of all jobs of a host.

CC-1 A folder that others may write to is not used: what is in it is executed.
CC-2 A lock is one of a file that is there: who removes a file holds it alone, and whoever had opened it before opens
     the next one.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return where a folder of this user is: `$XDG_CACHE_HOME/trimesh/NAME`, or in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "trimesh" / name


def make_own_folder(place: Path) -> os.stat_result:
    """Make a folder for this user alone, where it is not there; return what the system says of it (CC-1).

    Raises:
        PermissionError: It belongs to another user, or others may write to it.
        OSError: It cannot be made.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{place} must belong to this user, and no other may write to it: it holds code")
    return status


class LockedByFile:
    """What processes of a host use together, or one of them alone. None waits for the lock.

    Args:
        place: The file of the lock; made with the first lock, or before by `_open`.
    """

    def __init__(self, place: Path) -> None:
        self._lock_place = place
        self._lock = -1

    def lock_shared(self) -> bool:
        """Keep it as it is; return False while another process makes or removes some of it."""
        return self._locked(fcntl.LOCK_SH)

    def lock_alone(self) -> bool:
        """Become the only process that uses it; return False while there are others."""
        return self._locked(fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let others remove what is in no use."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        if self._lock < 0:
            self._lock = os.open(self._lock_place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _locked(self, kind: int) -> bool:
        self._open()
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._is_current():
            return True
        self.close()  # CC-2
        return self._locked(kind)

    def _is_current(self) -> bool:
        try:
            now = self._lock_place.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(now, os.fstat(self._lock))
