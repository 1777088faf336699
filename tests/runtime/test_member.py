"""A process of a mesh, as its owner sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import trio
import trio.testing
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import HostLost, ProcDied, limits
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import ProcessState
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import DownReason, Link, LinkDown
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent

CHILD = ProcId(2)


@attrs.define
class StagedChild:
    """A process of which the test says what is heard."""

    report_seconds: float
    loss: HostLoss | None = None
    link: Link = attrs.field(factory=RecordingLink)
    host_name: str = "far"
    lease: str = "LEASE_SECONDS"
    pid: int = 0

    async def spawner_state(self) -> str | None:
        """Nothing is known."""
        await trio.lowlevel.checkpoint()
        return None

    async def kernel_state(self, record: str = "") -> ProcessState | None:
        """Nothing is known."""
        del record
        await trio.lowlevel.checkpoint()
        return None

    def signal(self, signum: int) -> None:
        """Nothing: the test says what comes of it."""


@asynccontextmanager
async def member_of(child: StagedChild) -> AsyncGenerator[tuple[Member, list[Exception]], None]:
    """A member that runs, and the errors of its death."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1)
    died: list[Exception] = []
    async with trio.open_nursery() as proc.nursery:
        member = Member(proc, proc.peer(CHILD), 0, "procs", Extent().point(0), 0, lambda _, error: died.append(error))
        member.started(child)
        yield member, died
        proc.nursery.cancel_scope.cancel()


async def test_kill_of_a_member_that_is_not_there_yet_returns():
    """P1: the one before it has ended; its follower, which is being started, is not waited for."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1)
    member = Member(proc, proc.peer(ProcId(2)), 0, "procs", Extent().point(0), 1, lambda *_: None)
    with trio.fail_after(1):
        await member.end_by_kill()
    assert not member.gone.is_set()


async def test_loss_of_a_host_that_is_told_late_is_what_its_processes_have_died_of(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """H4: their links end first; the session may be unheard for its lease, and the reason of a goodbye come later."""
    del autojump_clock
    child = StagedChild(limits.FAR_EXIT_REPORT_SECONDS)
    async with member_of(child) as (member, died):
        member.link_lost(LinkDown(DownReason.CLOSED))
        await trio.sleep(limits.HOST_LEASE_SECONDS + limits.AGENT_EXIT_SECONDS)
        child.loss = HostLoss("far", "agent exit", "its agent has ended")
        member.exited(ExitReport.unknown(CHILD))
    assert [type(error) for error in died] == [HostLost]


async def test_report_that_came_while_its_owner_was_stopped_counts(mock_clock: trio.testing.MockClock) -> None:
    """A process that was stopped, as by a debugger, has had no chance to read it."""
    async with member_of(StagedChild(limits.EXIT_REPORT_SECONDS)) as (member, died):
        member.link_lost(LinkDown(DownReason.CLOSED))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(100 * limits.EXIT_REPORT_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        member.exited(ended_by(signal=9))
    (error,) = died
    assert isinstance(error, ProcDied)
    assert error.signal == 9


def ended_by(signal: int) -> ExitReport:
    """A report of an end by a signal."""
    return ExitReport(CHILD, 7, None, signal, oom_killed=False, stderr_tail="", ended_at=0)
