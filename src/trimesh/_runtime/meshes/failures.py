"""Failures of one mesh: errors that survivors raise because a peer died, failure handlers, restarts.

Ranks that meet in a collective, or over a socket of their own, detect a death by themselves, often before its owner
does. Such a follow-on error does not count as a second failure: it is noted on the death, so that `except* ProcDied`
catches everything.

The failure handlers of one process mesh, and of the actors on it, while their blocks are open:

    failure --> handlers, the last opened first --(none has handled it)--> the policy of the mesh

FH-1 A handler is called when the failure is recorded, before any waiting call raises, in the order of the failures,
     as the policy is (X3).
FH-2 A handler that raises has handled nothing: the policy decides, and the handler's block raises its error.
FH-3 No handler is called once its block has been left, nor for a failure outside of its own view.
"""

from __future__ import annotations

import contextvars
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import trio

from trimesh import limits
from trimesh._runtime.actors.context import set_proc_of_task
from trimesh._runtime.actors.reports import log_kept_back
from trimesh._runtime.tasks.background import without_consequences
from trimesh._runtime.values.codec import describe
from trimesh._supervision.supervisor import Begin, Decision, GiveUp, Round, Supervisor
from trimesh.context_managers import asynccontextmanager, contextmanager
from trimesh.errors import (
    HostLost,
    LinkLost,
    Origin,
    ProcDied,
    RemoteError,
    RestartLimit,
    add_note,
    leaves,
    origin,
    text_of,
)
from trimesh.events import Failure, OnFailure

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.values.endpoint_spec import MemberInfo


Place = tuple[str, int]
"""A process: host and pid."""
MeshProcesses = Collection[Place]
"""Processes of one mesh, of all incarnations."""

_BY_TYPE: Final = frozenset({"torch.distributed.DistBackendError", "torch.distributed.DistNetworkError"})
"""Errors of torch, which this process need not have imported."""

_BY_TEXT: Final = (
    r"(?is)connection (closed|reset|was likely closed)|broken pipe|timed out waiting .* (recv|send) operation"
    r"|(recv|send|read|write) (timeout|error)|socket closed"
)
"""Messages of gloo in a RuntimeError of its C++ files, and of c10d's store; compiled on first use."""

DEATHS: Final = (ProcDied, HostLost, LinkLost)


def says_peer_is_gone(leaf: BaseException) -> bool:
    """Return whether an error that is not a group reports that the other side of a connection is gone."""
    if isinstance(leaf, RemoteError):
        name, text = leaf.type_name, leaf.message
    else:
        name, text = f"{type(leaf).__module__}.{type(leaf).__qualname__}", text_of(leaf)
    if isinstance(leaf, ConnectionError) or name in _BY_TYPE or name.replace("._C._distributed_c10d", "") in _BY_TYPE:
        return True
    return isinstance(leaf, RuntimeError | RemoteError) and text_says_peer_is_gone(text)


def text_says_peer_is_gone(text: str) -> bool:
    """Return whether the text of an error, or the end of a traceback, is a lost connection of gloo or c10d."""
    return ("gloo" in text or "c10d" in text) and re.search(_BY_TEXT, text) is not None


def fold_into_deaths(errors: Sequence[Exception], meshes: Sequence[MeshProcesses] | None = None) -> list[Exception]:
    """Remove follow-on errors, in which survivors only report a lost peer; note them on its death.

    If no member has died they stay: the root cause is another one.

    Args:
        errors: Errors of members of one mesh, or of several.
        meshes: The processes of each mesh, when there are several: only those of one mesh are peers.
    """
    found = [leaf for error in errors for leaf in leaves(error)]
    deaths = [leaf for leaf in found if isinstance(leaf, DEATHS) and origin(leaf).point is not None]
    if not deaths:
        return list(errors)
    dead: set[Place] = {place for leaf in deaths if (place := place_of(origin(leaf))) is not None}

    def is_told(leaf: BaseException) -> bool:
        place = place_of(origin(leaf))
        if place is None or place in dead or not says_peer_is_gone(leaf):
            return False
        return meshes is None or any(place in mesh and not dead.isdisjoint(mesh) for mesh in meshes)

    told = [leaf for leaf in found if is_told(leaf)]
    if not told:
        return list(errors)
    _note(deaths[0], told)
    return [rest for error in errors if (rest := _without(error, told)) is not None]


def place_of(where: Origin | MemberInfo | None) -> Place | None:
    """Return the process of a member; None for this program, and for an unknown process."""
    return None if where is None or not where.pid else (where.host, where.pid)


def _without(error: Exception, told: Sequence[BaseException]) -> Exception | None:
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.split(lambda leaf: any(leaf is one for one in told))[1]
    return None if any(error is one for one in told) else error


def _note(death: BaseException, told: Sequence[BaseException]) -> None:
    lines = ["follow-on errors of processes that were connected to it:"]
    for leaf in told[: limits.SURVIVORS_TOLD]:
        where = origin(leaf)
        place = "" if where is None else f"{describe(where)}: "
        text = " ".join(str(leaf).split())[: limits.SURVIVOR_CHARS]
        lines.append(f"  {place}{type(leaf).__name__}: {text}")
    if len(told) > limits.SURVIVORS_TOLD:
        lines.append(f"  and {len(told) - limits.SURVIVORS_TOLD} more")
    add_note(death, "\n".join(lines))


# ---- failure handling ------------------------------------------------------------------------------------------------


class _Handling:
    """A handler while its block is open.

    Attributes:
        scope: Cancel scope around the body.
    """

    def __init__(self, handler: OnFailure, sees: Callable[[int], bool]) -> None:
        self.sees = sees
        self.scope = trio.CancelScope()
        self.errors: list[BaseException] = []
        self._handler = handler
        self._context = contextvars.copy_context()

    def handles(self, failure: Failure) -> bool:
        """Call the handler, in the context of its block."""
        try:
            answer: Any = self._context.copy().run(self._handler, failure)
            if inspect.iscoroutine(answer):
                answer.close()
            if answer is not None and not isinstance(answer, bool):
                raise TypeError(
                    f"a failure handler must return True (handled) or False, at once, got {answer!r}: make it a plain "
                    "def, and start tasks from it in a nursery of your own"
                )
        except BaseException as error:  # noqa: BLE001 - raised by the block of the handler
            self.errors.append(error)
            self.scope.cancel(reason="its failure handler has raised an error")
            return False
        return bool(answer)


class FailureHandling:
    """Open failure handlers of one process mesh."""

    def __init__(self) -> None:
        self._open: list[_Handling] = []

    def is_handled(
        self,
        proc_ranks: Collection[int],
        origin_of: Callable[[int], Origin],
        ranks: Collection[int],
        reason: Exception,
        *,
        has_ended: bool,
    ) -> bool:
        """Return whether a handler has handled a failure.

        Args:
            origin_of: Returns the place of the member of a rank.
            reason: The failure. For an error that only reports a stop no handler is called.
        """
        if not self._open or without_consequences(reason) is None:
            return False
        points = tuple(point for rank in ranks if (point := origin_of(rank).point) is not None)
        first, where = origin_of(min(ranks)), origin(reason)
        incarnation = (first if where is None or where.mesh != first.mesh else where).incarnation
        failure = Failure(mesh=first.mesh, points=points, reason=reason, incarnation=incarnation, has_ended=has_ended)
        asked = [one for one in reversed(self._open) if any(one.sees(rank) for rank in proc_ranks)]
        return any(one.handles(failure) for one in asked)

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def open(self, handler: OnFailure, sees: Callable[[int], bool]) -> AsyncGenerator[None, None]:
        """Call `handler` for failures while the body runs.

        Args:
            handler: A plain function, not async.
            sees: Returns whether the handler's view shows the process of a rank.

        Raises:
            ExceptionGroup: The errors of the handler, beside that of the body.
        """
        one = _Handling(handler, sees)
        error: BaseException | None = None
        await trio.lowlevel.checkpoint()
        self._open.append(one)
        try:
            with one.scope:
                yield
        except BaseException as raised:  # noqa: BLE001 - raised below, beside the errors of the handler
            error = raised
        finally:
            self._open.remove(one)
        if one.errors:
            found = [*one.errors] if error is None else [*one.errors, error]
            raise BaseExceptionGroup("the failure handler has raised errors", found) from None
        if error is not None:
            raise error


def check_handler(handler: Any) -> None:
    """Refuse a handler that cannot return its verdict at once.

    Raises:
        TypeError: It is not a plain function.
    """
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        raise TypeError(
            "on_failure takes a plain function of a Failure, which is called before waiting calls raise and so must "
            f"not wait, got {handler!r}: start tasks from it in a nursery of your own, by nursery.start_soon(...)"
        )


# ---- restart rounds of a supervisor: take down, rest, start again ----------------------------------------------------

# Each round is a task of the process; the end of the block stops it and waits for it.


class Restartable(Protocol):
    """Members of a mesh that can be restarted."""

    def going_down(self, round_: Round) -> None:
        """Make calls to the members of a round wait from now on."""

    async def take_down(self, round_: Round) -> None:
        """End the live members of a round, in good order."""

    async def bring_up(self, round_: Round) -> None:
        """Start the members of a round; raise on failure."""

    def gave_up(self, round_: Round | None, rank: int, error: RestartLimit) -> None:
        """Handle the end of restarts: the start of `round_` failed too often, or with None the member at `rank`."""


class _Course:
    """A round under way."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()


class Restarts:
    """All restarts of one mesh.

    Attributes:
        proc: The owner's process.
        supervisor: Plans the rounds.
    """

    def __init__(self, proc: Proc, supervisor: Supervisor, members: Restartable) -> None:
        self.proc = proc
        self.supervisor = supervisor
        self.members = members
        self._courses: dict[Round, _Course] = {}

    def failed(self, rank: int, cause: Exception) -> None:
        """Restart a member that has failed."""
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
            with trio.CancelScope(shield=True):  # earlier rounds were cancelled; this one takes over their members
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
        except Exception as error:  # noqa: BLE001 - any error of a start causes the next round
            cause = _cause(error)
            decision = self.supervisor.start_failed(round_, cause, trio.current_time(), self.proc.chance())
            self._act(decision, round_, round_.ranks[0] if round_.ranks else -1)
        else:
            self.supervisor.started(round_)

    def stop(self) -> None:
        """Restart nothing more, and stop the rounds under way."""
        self.supervisor.stop()
        for course in self._courses.values():
            course.scope.cancel(reason="the mesh is being stopped")

    async def wait_stopped(self) -> None:
        """Wait until no round is under way; members that it has started by then belong to the mesh."""
        while self._courses:
            await next(iter(self._courses.values())).over.wait()


@contextmanager
def remaking(remade_by: dict[int, trio.lowlevel.Task], ranks: Collection[int]) -> Generator[None]:
    """Note in a table, while the block runs, that this task is making the members of some ranks again."""
    remade_by.update(dict.fromkeys(ranks, trio.lowlevel.current_task()))
    try:
        yield
    finally:
        for rank in ranks:
            remade_by.pop(rank, None)


def _cause(error: Exception) -> Exception:
    """Return the root cause of a failed start: the first leaf of the group."""
    first = next(leaves(error))
    return first if isinstance(first, Exception) else error
