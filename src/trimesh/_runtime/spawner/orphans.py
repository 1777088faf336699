"""What workers leave behind: descendants that nothing else would end.

A worker leads its own session and process group. Its descendants are found by three marks: the group (killed with
it), the session, and the environment marker, which also names those that have left both. The spawner is the subreaper
of the family, so a descendant whose parent has ended becomes a child of the spawner, where it is seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from trimesh import limits
from trimesh._runtime.system import prctl
from trimesh._runtime.system.exits import parent_of, stat_of
from trimesh._runtime.system.tracker import TRACKER_MARK, release_tracker

_READ_BYTES: Final = 65_536

_WALKS_MAX: Final = 10
"""Walks up to the ancestors of one process, of which any may end meanwhile."""

_READS_MAX: Final = 10
"""Reads of one environment in a row, of which each may fall into the start of another program."""

_VSIZE, _CODE_END, _ENV_START, _ENV_END = (number - 3 for number in (23, 27, 50, 51))

_TRACKER: Final = re.compile(rb"(?:^|\0)" + TRACKER_MARK.encode() + rb"=")
_MARK: Final = re.compile(rb"(?:^|\0)" + prctl.MARKER.encode() + rb"=([0-9a-f]{16})\.([0-9a-f]{16})\0")


class Children:
    """The children of this process, adopted ones and zombies included. Its descriptor is opened once, for bad times."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        try:
            self._fd = os.open(f"/proc/self/task/{self._pid}/children", os.O_RDONLY)
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
            self._fd = -1

    def pids(self) -> list[int]:
        if self._fd < 0:
            return [child for child in _all_pids() if parent_of(child) == self._pid]
        data, piece = b"", b" "
        while piece:
            piece = os.pread(self._fd, _READ_BYTES, len(data))
            data += piece
        return [int(word) for word in data.split()]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


class ExecutingError(Exception):
    """A process is on its way into another program: its new environment is not laid out yet. Look again soon."""


def marked_proc(pid: int) -> tuple[int, int] | None:
    """Return (family, worker) that a process is marked with, None when it has no mark or cannot be read.

    Raises:
        ExecutingError: It cannot be told now.
    """
    environment = b""
    with contextlib.suppress(OSError):
        for _ in range(_READS_MAX):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if environment or not _may_have_environment(pid):
                break
        else:
            raise ExecutingError
    found = _MARK.search(environment + b"\0")
    return (int(found[1], 16), int(found[2], 16)) if found else None


def _may_have_environment(pid: int) -> bool:
    """Return whether a process whose environment reads as empty has one, or is about to have one.

    During `execve` the kernel gives a process its new memory first, says then where the environment is, and where the
    code is last: 3 of 100 reads fall in between for a shell that executes itself in a loop.
    """
    fields = stat_of(pid)
    memory, code_end, start, end = (int(fields[index]) for index in (_VSIZE, _CODE_END, _ENV_START, _ENV_END))
    is_laid_out_empty = code_end != 0 and start == end
    return memory != 0 and not is_laid_out_empty  # zombies and threads of the kernel have no memory


def kill_marked(root_id: int, spared: Collection[int] = ()) -> int:
    """SIGKILL every process of this machine that carries the mark of a family, except the caller.

    For the case that no process is left that knows them by parenthood. Cost: one small file a process of the machine.

    Args:
        spared: Pids of its spawners that live on: they, and all below them, are left alone.

    Returns:
        How many were signalled and may need a moment to go, or could not be told yet: look again until there is none.
    """
    left = 0
    for pid in _all_pids():
        try:
            if pid != os.getpid() and _is_marked(pid, root_id):
                left += _kill_if_marked(pid, root_id, spared)
        except ExecutingError:
            left += 1
    return left


def _kill_if_marked(pid: int, root_id: int, spared: Collection[int]) -> bool:
    with contextlib.suppress(OSError):  # gone meanwhile, or not ours
        pidfd = os.pidfd_open(pid)
        try:
            # Still the same process, now that its number is held.
            if _is_marked(pid, root_id) and not _descends_from(pid, spared):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


def _is_marked(pid: int, root_id: int) -> bool:
    found = marked_proc(pid)
    return found is not None and found[0] == root_id


def _descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Return whether a process is one of `ancestors`, or below one: a spawner keeps its descendants for life."""
    for _ in range(_WALKS_MAX):
        at, last = pid, pid
        while at > 1 and at not in ancestors:
            last, at = at, parent_of(at)
        if at in ancestors:
            return True
        if at == 1 or Path(f"/proc/{last}").exists():
            return False
    return True  # its parents end faster than we can look; it lives


class Orphans:
    """Descendants of workers whose own parents have ended; children of the spawner by adoption."""

    def __init__(self, root_id: int, children: Children) -> None:
        self._root_id = root_id
        self._children = children
        self._owners: dict[int, int] = {}
        self._others_seen: float | None = None

    def reaped(self, pid: int) -> None:
        """Learn that an orphan is gone; its number may be used again."""
        self._owners.pop(pid, None)

    def sweep(self, workers: Mapping[int, int]) -> bool:
        """Kill the orphans whose worker has ended. Those whose worker is unknown live until the family ends.

        Args:
            workers: The incarnations of the workers that are there, by pid.

        Returns:
            False when one could not be told, as it was executing another program: sweep again in a moment.
        """
        alive = {self._root_id, *workers.values()}  # what a preloaded module has started is marked as the spawner's
        is_done = True
        for pid in [pid for pid in self._children.pids() if pid not in workers]:
            owner = self._owners.get(pid)
            if owner is None:
                try:
                    owner = self._owner_of(pid, workers)
                except ExecutingError:
                    is_done = False
                    continue
            if owner is None:
                continue
            self._owners[pid] = owner
            if owner not in alive:
                kill_child(pid)
        return is_done

    def end(self, children: Collection[int]) -> None:
        """Kill all that are left of the family; resource trackers, too, if they do not end by themselves soon after.

        Call it again until none is left.
        """
        release_tracker()
        now = time.monotonic()
        others = [pid for pid in children if not is_tracker(pid)]
        if others or self._others_seen is None:
            self._others_seen = now
        for pid in others if now < self._others_seen + limits.TRACKER_SECONDS else children:
            kill_child(pid)

    def _owner_of(self, pid: int, workers: Mapping[int, int]) -> int | None:
        marked = marked_proc(pid)
        if marked is not None:
            return marked[1] if marked[0] == self._root_id else None  # else of a family that ends by itself
        with contextlib.suppress(ProcessLookupError):
            return workers.get(os.getsid(pid))
        return None


def is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker; one that has ended is none."""
    with contextlib.suppress(OSError):
        return _TRACKER.search(Path(f"/proc/{pid}/environ").read_bytes()) is not None
    return False


def kill_child(pid: int) -> None:
    """SIGKILL a child that is not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
