"""Looking at processes from outside, through /proc and pidfds; of the code under test only its marker is known."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import trio
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]

TEMPLATE_MARKER = f"{0:016x}.{0:016x}"
"""Of no family: the process that copies of spawners are forked from (`tests/spawner_template.py`)."""


@attrs.frozen
class Seen:
    """One process at one moment."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    marker: str


def see(pid: int) -> Seen | None:
    """Return what /proc says about `pid`, None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    marker = next((entry[13:].decode() for entry in environ.split(b"\0") if entry.startswith(b"TRIMESH_PROC=")), "")
    return Seen(pid, int(stat[1]), int(stat[2]), int(stat[3]), stat[0], int(stat[19]), marker)


def state(pid: int) -> str:
    """Return the state letter; "" when gone. A zombie counts as gone: nobody but its parent can do more."""
    seen = see(pid)
    return "" if seen is None or seen.state in "ZX" else seen.state


def parent_of(pid: int) -> int:
    """Return the parent of a process that is there."""
    seen = see(pid)
    assert seen is not None, pid
    return seen.parent


def is_there(pid: int) -> bool:
    """Return whether there is such a process, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


def everything() -> Iterator[Seen]:
    """Yield every living process."""
    for name in os.listdir("/proc"):
        seen = see(int(name)) if name.isdecimal() else None
        if seen is not None and seen.state not in "ZX":
            yield seen


def family(root_id: int) -> list[int]:
    """Return the pids of all living processes that carry the marker of a family, the controller not included."""
    return [seen.pid for seen in everything() if seen.marker.startswith(f"{root_id:016x}.")]


def children(pid: int) -> list[int]:
    """Return the pids of the living children of `pid`."""
    return [seen.pid for seen in everything() if seen.parent == pid]


def spawners_here() -> list[int]:
    """Return the pids of the living spawners of this process, in the order of their start; no template of theirs."""
    seen = [seen for seen in map(see, children(os.getpid())) if seen is not None]
    spawners = [one for one in seen if one.marker and one.marker != TEMPLATE_MARKER]
    return [one.pid for one in sorted(spawners, key=lambda one: (one.started, one.pid))]  # pids begin anew at `pid_max`


def count_fds(pid: int | str = "self") -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def wait_until_all(check: Callable[[], list[bool]]) -> None:
    """Wait until all that `check` returns is true: what other processes do takes them a moment."""
    with trio.move_on_after(HANG_SECONDS):
        while not all(check()):  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.01)
    assert all(check())


def freeze(group: Path) -> None:
    """Freeze what is in a group of the freezer of cgroup v1; until it says so, a signal still gets through."""
    (group / "freezer.state").write_text("FROZEN")
    while (group / "freezer.state").read_text() != "FROZEN\n":
        os.sched_yield()


def wait_reaped(pid: int) -> None:
    """Block until the parent of a process that ends has taken note of it; nothing of this process runs meanwhile."""
    while os.path.exists(f"/proc/{pid}"):
        os.sched_yield()


def descendants(pid: int) -> list[int]:
    """Return all living processes that a process has started, directly or not."""
    parents = {one.pid: one.parent for one in everything()}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


async def wait_gone(pids: list[int]) -> None:
    """Wait until all of `pids` have ended.

    The rule is that nothing is left, not how soon: that hangs on the machine. Of fifty processes that execute
    themselves in a loop the first look at each takes 0.2 to 0.7 s on two idle cores (the kernel lets nobody read the
    environment in the middle of an execve), and 7 ms of CPU.
    """
    with contextlib.ExitStack() as opened:
        pidfds = dict[int, int]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds[pid] = os.pidfd_open(pid)
                opened.callback(os.close, pidfds[pid])
        with trio.move_on_after(HANG_SECONDS) as scope:
            for pidfd in pidfds.values():
                await trio.lowlevel.wait_readable(pidfd)
        left = [pid for pid in pids if state(pid)]
        assert not left, f"still there after {HANG_SECONDS} s: {left}"
        assert not scope.cancelled_caught


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) for the time of a block; it may be gone afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)


class Controller:
    """A controller in a process of its own, running a function of `tests.runtime.controllers`.

    It prints lines of integers; each is a set of pids, or ids, that the test asks for. SIGHUP has its default action,
    whatever the tests inherit: under nohup that is to ignore it.
    """

    def __init__(self, function: str, *arguments: str) -> None:
        restore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
        run = f"import sys; from tests.runtime.controllers import {function}; {function}(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{restore}; {run}", *arguments],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        )

    async def line(self) -> list[int]:
        """Return the next line of integers."""
        assert self.process.stdout is not None
        text = await trio.to_thread.run_sync(self.process.stdout.readline)
        return [int(word) for word in text.split()]

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        return await trio.to_thread.run_sync(self.process.wait)

    def close(self) -> None:
        """Kill it, if it still runs, and reap it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
