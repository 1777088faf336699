"""Runs the rounds that a supervisor asks for: take down, rest, start again.

Each round is a task of the process, not of the block, which has none; the block's end stops it and waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from trimesh._runtime.actors.context import set_proc_of_task
from trimesh._runtime.actors.supervision_log import log_kept_back
from trimesh._supervision.supervisor import Begin, Decision, GiveUp, Phase, Round, Supervisor
from trimesh.errors import RestartLimit, leaves

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


class Restartable(Protocol):
    """The members of a mesh, as what restarts them sees them."""

    def going_down(self, round_: Round) -> None:
        """Let calls to the members of a round wait from now on."""

    async def take_down(self, round_: Round) -> None:
        """End what lives of a round, in good order."""

    async def bring_up(self, round_: Round) -> None:
        """Start the members of a round; raise when that fails."""

    def gave_up(self, round_: Round | None, rank: int, error: RestartLimit) -> None:
        """Learn that there are no more restarts, on account of the start of a round, or else of a member."""


class _Course:
    """A round under way."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()


class Restarts:
    """All restarts of one mesh.

    Attributes:
        proc: The owner's process.
        supervisor: Decides.
    """

    def __init__(self, proc: Proc, supervisor: Supervisor, members: Restartable) -> None:
        self.proc = proc
        self.supervisor = supervisor
        self.members = members
        self._courses: dict[Round, _Course] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is restarted any more."""
        return self.supervisor.is_stopped

    def is_ending(self, rank: int) -> bool:
        """Return whether a member belongs to what is being taken down, so that its end is part of that."""
        round_ = self.supervisor.round_of(rank)
        return round_ is not None and round_.phase in (Phase.DOWN, Phase.RESTING)

    def failed(self, rank: int, cause: Exception) -> None:
        """Take the failure of a member that is to be restarted."""
        decision = self.supervisor.failed(rank, cause, trio.current_time(), self.proc.chance())
        self._act(decision, None, rank)

    def _act(self, decision: Decision, round_: Round | None, rank: int) -> None:
        match decision:
            case Begin(round=begun, replaced=replaced):
                courses = [self._courses[other] for other in replaced if other in self._courses]
                for course in courses:
                    course.scope.cancel(reason="a later failure has begun another restart")
                self._courses[begun] = _Course()
                self.members.going_down(begun)
                ranks = ", ".join(map(str, begun.ranks[:8])) + (", ..." if len(begun.ranks) > 8 else "")
                log_kept_back(
                    self.proc, self.supervisor.name, begun.cause, f"restarting rank {ranks} after {begun.delay:.3g} s"
                )
                self.proc.nursery.start_soon(self._run, begun, self._courses[begun], courses)
            case GiveUp(error=error):
                self.members.gave_up(round_, rank, error)
            case None:
                pass

    @trio.lowlevel.enable_ki_protection
    async def _run(self, round_: Round, course: _Course, before: list[_Course]) -> None:
        set_proc_of_task(self.proc)
        try:
            with trio.CancelScope(shield=True):  # they have been cancelled, and their members are ours now
                for other in before:
                    await other.over.wait()
            with course.scope:
                await self._restart(round_)
        finally:
            del self._courses[round_]
            course.over.set()

    async def _restart(self, round_: Round) -> None:
        await self.members.take_down(round_)
        await trio.sleep(self.supervisor.is_down(round_))
        self.supervisor.rested(round_)
        try:
            await self.members.bring_up(round_)
        except Exception as error:  # noqa: BLE001 - whatever keeps a member from starting is the cause of the next round
            cause = _cause(error)
            decision = self.supervisor.start_failed(round_, cause, trio.current_time(), self.proc.chance())
            self._act(decision, round_, round_.ranks[0] if round_.ranks else -1)
        else:
            self.supervisor.started(round_)

    def stop(self) -> None:
        """Restart nothing any more, and stop the rounds that are under way."""
        self.supervisor.stop()
        for course in self._courses.values():
            course.scope.cancel(reason="the mesh is being stopped")

    async def wait_stopped(self) -> None:
        """Wait until no round is under way; what it has started by then is its mesh's."""
        while self._courses:
            await next(iter(self._courses.values())).over.wait()


def _cause(error: Exception) -> Exception:
    """Return what a failed start is due to: the first leaf of the group."""
    first = next(leaves(error))
    return first if isinstance(first, Exception) else error
