"""Conformance cases for launchers of hosts: `check_launcher`.

LC-1 A case enters the job as users do; actors there report their processes and parents.
LC-2 Whatever a case does to the job, nothing of it is left afterwards, and it can be entered again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.errors import HostLost, leaves

Enter = Callable[[int], AbstractAsyncContextManager[HostMesh]]
_LOOK_SECONDS: Final = 0.02


@attrs.frozen
class LauncherSubject:
    """Launcher under test.

    Attributes:
        enter: Takes a number of hosts and returns the job to enter: `lambda count: MyJob(count)`.
        is_alive: Returns whether a process of a host lives: (name of the host, pid). None checks this machine, which is
            right for hosts on it.
        leftovers: Returns leftovers while no block is open, for the error: names of queued jobs, folders.
        kills: True if it can end a stopped agent (SIGSTOP). A launcher whose agents are started by something else
            cannot.
    """

    enter: Enter
    is_alive: Callable[[str, int], bool] | None = None
    leftovers: Callable[[], Sequence[str]] | None = None
    kills: bool = True

    def lives(self, host: str, pid: int) -> bool:
        """Return whether a process is alive."""
        return Path(f"/proc/{pid}").exists() if self.is_alive is None else self.is_alive(host, pid)


class Witness(Actor):
    """Probe actor: reports the processes of its host, and signals the agent there for a case."""

    @endpoint
    async def pids(self) -> tuple[int, int, int]:
        """Return the process ids of this process, of its spawner, and of the agent."""
        return os.getpid(), os.getppid(), _parent_of(os.getppid())

    @endpoint
    async def shown(self) -> bytes:
        """Return the agent's arguments and initial environment, which other users may be able to read."""
        agent = Path(f"/proc/{_parent_of(os.getppid())}")
        return (agent / "cmdline").read_bytes() + (agent / "environ").read_bytes()

    @endpoint
    async def signal_agent(self, signum: int) -> None:
        os.kill(_parent_of(os.getppid()), signum)

    @endpoint
    async def add(self, number: int) -> int:
        return number + 1

    @endpoint
    async def sleep(self) -> None:
        """Wait for ever."""
        await trio.sleep_forever()


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class _Seen:
    """The processes that a case has seen, by the names of their hosts."""

    def __init__(self, subject: LauncherSubject) -> None:
        self._subject = subject
        self._pids: list[tuple[str, int]] = []

    def add(self, hosts: HostMesh, found: Sequence[tuple[int, int, int]]) -> None:
        for host, pids in zip(hosts.names, found, strict=True):
            self._pids += [(host, pid) for pid in pids]

    async def check_gone(self) -> None:
        """Check that all of them have ended, within a moment after the block."""
        left = self._pids
        with trio.move_on_after(limits.KILL_SECONDS):
            while left := [one for one in left if self._subject.lives(*one)]:  # noqa: ASYNC110 - of other hosts, too
                await trio.sleep(_LOOK_SECONDS)
        assert not left, f"all processes must end with the block, got (host, pid) {left}"
        names = [] if self._subject.leftovers is None else list(self._subject.leftovers())
        assert not names, f"nothing of the job must be left after the block, got {names}"


# ---- the cases -------------------------------------------------------------------------------------------------------


async def _mesh(subject: LauncherSubject, seen: _Seen) -> None:
    """Two hosts have one agent each, and processes that can be called; the job can be entered twice."""
    for _ in range(2):
        async with subject.enter(2) as hosts, hosts.spawn_procs({"procs": 2}) as procs:
            assert dict(hosts.extent) == {"hosts": 2}
            assert len(hosts.names) == 2
            assert all(hosts.names), hosts.names
            async with procs.spawn("witnesses", Witness) as witnesses:
                assert list(await witnesses.add.call(1)) == [2] * 4
                pids = list(await witnesses.pids.call())
                seen.add(hosts, pids[::2])
                seen.add(hosts, pids[1::2])
                agents = [agent for _, _, agent in pids]
                assert agents[0] == agents[1]
                assert agents[2] == agents[3]
                assert (hosts.names[0], agents[0]) != (hosts.names[1], agents[2]), "two hosts have one agent"
        await seen.check_gone()


async def _secrets(subject: LauncherSubject, seen: _Seen) -> None:
    """The arguments and the environment of an agent have no token."""
    async with _witnesses(subject, 1) as (hosts, witnesses):
        seen.add(hosts, list(await witnesses.pids.call()))
        for shown in await witnesses.shown.call():
            assert b"trimesh-join" not in shown, "the agent shows its token"


async def _error(subject: LauncherSubject, seen: _Seen) -> None:
    """An error of the body passes through the block unchanged."""
    error = ValueError("as the case wants it")
    found: list[BaseException] = []
    try:
        async with _witnesses(subject, 2) as (hosts, witnesses):
            seen.add(hosts, list(await witnesses.pids.call()))
            raise error
    except (ValueError, BaseExceptionGroup) as caught:
        found = list(leaves(caught))
    assert found == [error], found


async def _cancel(subject: LauncherSubject, seen: _Seen) -> None:
    """A cancel leaves the block."""
    with trio.CancelScope() as scope:
        async with _witnesses(subject, 2) as (hosts, witnesses):
            seen.add(hosts, list(await witnesses.pids.call()))
            scope.cancel()
            await witnesses.sleep.call()
    assert scope.cancelled_caught


async def _cancelled_entry(subject: LauncherSubject, seen: _Seen) -> None:
    """A cancel during entry, early or late, leaves nothing behind; the job can be entered afterwards."""
    for seconds in (0.0, 0.05, 0.3, 0.6):
        with trio.move_on_after(seconds):
            async with subject.enter(2):
                pass
        await seen.check_gone()
    async with subject.enter(1) as hosts:
        assert len(hosts) == 1


async def _killed_agent(subject: LauncherSubject, seen: _Seen) -> None:
    """A killed agent is one `HostLost`, with name and place; the other host ends in order."""
    lost = await _lost_by(subject, seen, signal.SIGKILL)
    assert lost.reason in ("agent exit", "lease"), lost.reason


async def _stopped_agent(subject: LauncherSubject, seen: _Seen) -> None:
    """A stopped agent is lost after its lease, and killed."""
    if subject.kills:
        lost = await _lost_by(subject, seen, signal.SIGSTOP)
        assert lost.reason == "lease", lost.reason


async def _lost_by(subject: LauncherSubject, seen: _Seen, signum: int) -> HostLost:
    names = list[str]()
    found: list[BaseException] = []
    try:
        async with _witnesses(subject, 2, 2) as (hosts, witnesses):
            names += hosts.names
            seen.add(hosts, list(await witnesses.pids.call())[::2])
            await witnesses.slice(hosts=1, procs=0).signal_agent.call_one(signum)
            await witnesses.sleep.call()
    except BaseExceptionGroup as group:
        found = list(leaves(group))
    losses = {(error.host, error.point): error for error in found if isinstance(error, HostLost)}
    assert len(losses) == 1, f"a lost host must be reported as one HostLost, got {found}"
    assert all(isinstance(error, HostLost) for error in found), f"a lost host must raise nothing else, got {found}"
    (lost,) = losses.values()
    assert lost.host == names[1], lost.host
    assert dict(lost.point or {}) == {"hosts": 1}, lost.point
    return lost


@asynccontextmanager
async def _witnesses(
    subject: LauncherSubject, count: int, procs_per_host: int = 1
) -> AsyncGenerator[tuple[HostMesh, Any], None]:
    async with (
        subject.enter(count) as hosts,
        hosts.spawn_procs({"procs": procs_per_host}) as procs,
        procs.spawn("witnesses", Witness) as witnesses,
    ):
        yield hosts, witnesses


Case = Callable[[LauncherSubject, _Seen], Awaitable[None]]
_CASES: Final[dict[str, Case]] = {
    "mesh": _mesh,
    "secrets": _secrets,
    "error": _error,
    "cancel": _cancel,
    "cancelled entry": _cancelled_entry,
    "killed agent": _killed_agent,
    "stopped agent": _stopped_agent,
}

LAUNCHER_CASES: Final = tuple(_CASES)
"""Names of the cases of `check_launcher`."""


def check_launcher(case: str, subject: LauncherSubject, *, timeout: float = 120.0) -> None:
    """Run one case against a launcher of hosts; it starts real processes.

    Args:
        case: One of `LAUNCHER_CASES`.
        subject: The launcher.
        timeout: Seconds after which the case fails.

    Raises:
        AssertionError: The launcher breaks a rule; the text names the finding.
        TooSlowError: The case did not end in time.
    """

    async def run() -> None:
        seen = _Seen(subject)
        with trio.fail_after(timeout):
            await _CASES[case](subject, seen)
            await seen.check_gone()

    trio.run(run)
