"""Processes as /proc shows them: an observer that knows nothing of the code under test.

A run is told from others by a variable in the environment that its first process was executed with: every fork shows
the environment of the last exec above it, whatever it does to sessions, groups and parents. A zombie shows nothing any
more, so whoever was seen once is remembered by pid and start time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import attrs

MARKER = "TRIMESH_TEST_FAMILY"


@attrs.frozen
class Process:
    """One process of this machine, not only a number that may be used again."""

    pid: int
    started: int

    @property
    def state(self) -> str:
        """The kernel's letter (R, S, D, T, t, Z ...), "" once it has been reaped."""
        fields = _stat(self.pid)
        return fields[0] if fields and int(fields[19]) == self.started else ""

    @property
    def parent(self) -> int:
        """Pid of its parent, 0 once it is gone."""
        fields = _stat(self.pid)
        return int(fields[1]) if self.state else 0

    @property
    def session(self) -> int:
        """Number of its session."""
        return int(_stat(self.pid)[3])

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return self.state not in ("", "Z", "X")

    @property
    def name(self) -> str:
        """What `ps -o comm` shows."""
        return _read(f"/proc/{self.pid}/comm").decode(errors="replace").strip()

    def descriptors(self) -> list[str]:
        """What its open descriptors refer to, sorted; sockets without inodes, its word to the test left out."""
        found = []
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{self.pid}/fd/{number}").partition(":[")[0])
        return sorted(name for name in found if not name.endswith("/stage"))

    def sockets(self) -> list[str]:
        """The inodes of its open sockets."""
        found = []
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{self.pid}/fd/{number}").partition(":[")
                if kind == "socket":
                    found.append(inode.rstrip("]"))
        return found

    def threads(self) -> list[str]:
        """The names of its threads, sorted."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sorted(_read(f"{task}/comm").decode(errors="replace").strip() for task in tasks.iterdir())

    def shared_mappings(self) -> list[str]:
        """The shared memory that it has mapped, sorted."""
        lines = _read(f"/proc/{self.pid}/maps").decode(errors="replace").splitlines()
        columns = [line.split(maxsplit=5) for line in lines]
        return sorted(column[5] for column in columns if len(column) == 6 and "s" in column[1])

    def children(self) -> list[int]:
        """The pids of its children, zombies included."""
        return [pid for pid in pids() if (fields := _stat(pid)) and int(fields[1]) == self.pid]

    def signal(self, signum: int) -> None:
        """Signal it, unless it has gone."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            pidfd = os.pidfd_open(self.pid)
            undo.callback(os.close, pidfd)
            if self.state:
                signal.pidfd_send_signal(pidfd, signum)

    def __str__(self) -> str:
        command = _read(f"/proc/{self.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")[:100]
        return f"{self.pid} ({self.name}, state {self.state or 'gone'}, parent {self.parent}): {command}"


def look(pid: int) -> Process | None:
    """Return the process that has this number now."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def stop(pid: int) -> None:
    """Stop a process, and wait until it has: a busy machine takes its time."""
    os.kill(pid, signal.SIGSTOP)
    while (found := look(pid)) is not None and found.state not in ("T", "Z", "X"):
        os.sched_yield()


def pids() -> list[int]:
    """Return all numbers in use."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def family(mark: str) -> set[Process]:
    """Return the running processes of one run."""
    wanted = f"{MARKER}={mark}".encode()
    found = {look(pid) for pid in pids() if wanted in _read(f"/proc/{pid}/environ").split(b"\0")}
    return {process for process in found if process is not None and process.is_running}


def wait_ended(processes: Iterable[Process], deadline: float) -> list[Process]:
    """Wait until all have ended, at most until `deadline` (`time.monotonic()`); return those that have not."""
    poll = select.poll()
    waiting: dict[int, Process] = {}
    with contextlib.ExitStack() as undo:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
                undo.callback(os.close, pidfd)
                if process.is_running:
                    waiting[pidfd] = process
                    poll.register(pidfd, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left * 1000):
                poll.unregister(pidfd)
                del waiting[pidfd]
    return list(waiting.values())


def wait_family_ended(
    mark: str, seconds: float, besides: Iterable[Process] = (), kept: Collection[Process] = ()
) -> list[Process]:
    """Wait until nothing of a run is running but `kept`, nor any of `besides`; return what is there after `seconds`."""
    deadline = time.monotonic() + seconds
    left = wait_ended({*family(mark), *besides}.difference(kept), deadline)
    while not left and (new := family(mark).difference(kept)):
        left = wait_ended(new, deadline)
    return left


def kill_family(mark: str) -> None:
    """End all of a run, and what it forks meanwhile."""
    while running := family(mark):
        for process in running:
            process.signal(signal.SIGKILL)
        wait_ended(running, time.monotonic() + 1)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    return _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
