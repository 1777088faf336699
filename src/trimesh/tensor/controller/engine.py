"""Tensor engine of one mesh at the controller: sends commands and requests to the ranks, handles their replies.

It separates root causes from follow-on errors of several ranks (rule N3):

- The error of a failed rank precedes those of the ranks that waited for it in a collective, and is their cause.
- A death of a process is reported instead of the errors of ranks that waited for it; the first of these becomes its
  context. If a request went only to such ranks, their errors are reported, each with the death as its cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
import trio

from trimesh import limits
from trimesh._runtime.deadlocks import BlockedSearch
from trimesh._runtime.peers import IncomingCall, Peer
from trimesh._runtime.services import TENSORS
from trimesh._runtime.values import class_of, take_payload
from trimesh._transport.interface import Buffer
from trimesh.errors import (
    CollectiveFailed,
    DeadlockError,
    MeshError,
    MeshErrorGroup,
    MeshStopped,
    PayloadError,
    ProcDied,
    ProtocolError,
    add_note,
    place_name,
    set_origin,
)
from trimesh.tensor.controller.team import Team, TeamFailure, issuing_line
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.arguments import default_device
from trimesh.tensor.protocol.messages import PROCESS_ENDED
from trimesh.tensor.rank.moves import moves_of

if TYPE_CHECKING:
    from trimesh._runtime.channels import CarriedPorts
    from trimesh._runtime.life import OwnedProcs, Proc
    from trimesh._runtime.values import MeshInfo
    from trimesh.errors import Origin
    from trimesh.shape.region import Region
    from trimesh.tensor.controller.shapes import Expected, Shapes


_log = logging.getLogger("trimesh")

_Answer = tuple[Any, list[memoryview], "tuple[int, int] | None", Any]
"""Payload, bodies, the command that failed, carried ports."""


def unexplained_death(name: str, origin: Origin) -> ProcDied:
    """Return the error for a process that has ended, before tasks have found out how."""
    error = ProcDied(f"{place_name(name, origin.point)} (pid {origin.pid}) has ended", reason="lost")
    set_origin(error, origin)
    return error


_WARNED_MAX = 20
"""Failures of one team that a warning lists; more are usually one mistake in a loop."""


@attrs.define(eq=False)
class RankRequest:
    """Request for values of ranks.

    Attributes:
        number: Number in messages.
        team: The ranks that are to answer.
        expected: Form of the answers.
        waiting: Processes that have not answered, with their places in the team.
        answers: Answers or errors of the others, by place.
        lent: Memory to read of ranks that have answered, by process: as `Handle.fields`.
        complete: Set when all have answered.
        is_left: Set when nothing waits for the request any more.
    """

    number: int
    team: Team
    expected: Expected
    waiting: dict[Peer, int]
    answers: dict[int, _Answer | bytes | Exception] = attrs.field(factory=dict[int, Any])
    lent: dict[Peer, tuple[Any, ...]] = attrs.field(factory=dict["Peer", tuple[Any, ...]])
    complete: trio.Event = attrs.field(factory=trio.Event)
    is_left: bool = False


@attrs.define(eq=False)
class Engine:
    """Tensor engine of one mesh, owned by the mesh's block: leaving the block executes all issued commands first.

    Attributes:
        proc: The controller's process.
        number: Number in messages.
        owned: The mesh.
        shapes: The plans of this process.
        engines: All engines of this process, by number.
        on_closed: Called when its block has been left.
        on_team: Called with each new team.
        device: Default device of the ranks' tensors.
        current: Team of the last command.
        is_closed: Set when nothing more can be issued.
        stuck: Waits that ranks have reported, by process; read only by waits without `await`.
        thread: Thread of its Trio loop, in which all commands are issued.
        has_values: Whether tensors have values; not in a simulation without processes.
    """

    has_values: ClassVar[bool] = True

    proc: Proc
    number: int
    owned: OwnedProcs
    shapes: Shapes
    engines: Mapping[int, Engine]
    on_closed: Callable[[Engine], None]
    on_team: Callable[[Team], None]
    device: torch.device = attrs.field(factory=default_device)
    current: Team | None = None
    is_closed: bool = False
    stuck: dict[Peer, messages.Stuck] = attrs.field(factory=dict["Peer", messages.Stuck])
    thread: int = attrs.field(factory=get_ident)
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    _progress: trio.Event = attrs.field(factory=trio.Event)
    _refusals: dict[Peer, str] = attrs.field(factory=dict["Peer", str])
    _lost: list[Team] = attrs.field(factory=list[Team])
    _lost_numbers: set[int] = attrs.field(factory=set[int])
    _teams: dict[Region, Team] = attrs.field(factory=dict["Region", Team])
    _by_number: dict[int, Team] = attrs.field(factory=dict[int, Team])
    _opened: set[Peer] = attrs.field(factory=set["Peer"])
    _requests: dict[int, RankRequest] = attrs.field(factory=dict[int, RankRequest])
    _unread: set[int] = attrs.field(factory=set[int])
    """Requests whose answers are lent memory that has not been read yet."""

    @property
    def name(self) -> str:
        return self.owned.info.name

    def new_refs(self, number: int) -> int:
        """Return the first of `number` unused refs, unique in this process, as a recording may span several meshes."""
        shapes = self.shapes
        first = shapes.refs
        shapes.refs = first + number
        return first

    @property
    def teams(self) -> list[Team]:
        """Teams that accept commands."""
        return list(self._by_number.values())

    # ---- teams -----------------------------------------------------------------------------------------------

    def team(self, region: Region) -> Team:
        """Return the team of a view; a new one if a process of it has been restarted since.

        Raises:
            ValueError: The view is empty.
        """
        team = self._teams.get(region)
        if team is not None and not team.is_lost:
            return team
        ranks = region.ranks()
        if not ranks:
            raise ValueError("tensors need at least one process, got an empty view")
        info = self.owned.info
        peers = [self.proc.peer(info.members[rank].proc_id) for rank in ranks]
        team = Team(self, self.shapes.new_number(), region, peers, [info.origin(rank) for rank in ranks])
        self.check_open(team)
        self._teams[region] = self._by_number[team.number] = team
        whole = self.owned.whole.extent
        for rank, peer in zip(ranks, peers, strict=True):
            if peer not in self._opened:
                self._opened.add(peer)
                opening = messages.Open(self.number, self.name, list(whole), list(whole.values()), rank)
                self._send([peer], opening)
        table = attrs.evolve(region, excluded=frozenset[int]()).ranks()
        procs = [info.members[rank].proc_id if rank in region else 0 for rank in table]
        extent = region.extent
        self._send(
            peers,
            messages.NewTeam(self.number, team.number, list(extent), list(extent.values()), list(table), procs),
        )
        self.on_team(team)
        return team

    def switch_to(self, team: Team) -> None:
        """Keep the order of commands on ranks that both teams have."""
        for other in self._by_number.values():
            if other is not team and other.stream and team.shares_order(other):
                self.flush_team(other)
        self.current = team

    def check_open(self, team: Team) -> None:
        """Raise if the team cannot execute commands.

        Raises:
            MeshStopped: The block that owns the processes is being left, or was.
            ProcDied: A process of the team has ended.
            MeshError: A process cannot hold tensors, or has not started yet.
        """
        if self.is_closed or self.owned.is_stopping:
            raise MeshStopped(f"{self.name} accepts no operations: the block that owns its processes is being left")
        for peer, origin in zip(team.peers, team.origins, strict=True):
            if peer.death is not None:
                error = peer.death(maybe_executed=False)
            elif peer in self._refusals:
                error = MeshError(self._refusals[peer])
            elif peer.link is None and peer in self._opened:
                error = unexplained_death(team.name, origin)
            elif peer.link is None:
                error = MeshError(f"a process of {team.name} is being restarted: write `await procs.settled()` first")
            else:
                continue
            set_origin(error, origin)
            raise error

    def check_thread(self) -> None:
        """Refuse operations of other threads, except those of autograd's engine while Trio's thread waits for them.

        Raises:
            RuntimeError: The calling thread is another one.
        """
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"operations on tensors of {self.name} must be issued in the thread of its Trio loop, got another "
                "thread: call the function that does so by trio.from_thread.run_sync(function)"
            )

    # ---- sending ---------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make Trio's loop send issued commands soon, even if a task of asyncio runs now."""
        if not trio.lowlevel.in_trio_task():
            self._token.run_sync_soon(self.flush, idempotent=True)

    def flush(self) -> bool:
        """Send all issued commands; return whether there were any."""
        teams = list(self._by_number.values())
        is_sent = False
        # Unsent commands of one team may use tensors that another frees, so commands are sent first. Teams with unsent
        # commands have no rank in common (`switch_to`).
        for team in teams:
            if team.stream:
                self._post(team)
                is_sent = True
        for team in [*teams, *self._lost]:  # living ranks of a lost team hold tensors until freed
            if team.freed:
                self._post(team)
                is_sent = True
        if self._lost:
            self._lost = [team for team in self._lost if team.living]
        return is_sent

    def flush_team(self, team: Team) -> None:
        """Send a team's issued commands and handle replies. Blocks without `await` while the ranks are far behind.

        Raises:
            trio.TooSlowError: The deadline of the task has passed meanwhile.
        """
        self._post(team)
        if self.proc.is_simulated or get_ident() != self.thread:  # autograd's thread, while Trio's waits
            return
        self.proc.pump(0)
        team.is_lost |= any(peer.link is None for peer in team.peers)  # the next operation raises
        while team.issued - team.executed > limits.TENSOR_COMMANDS_AHEAD and not team.is_lost:
            self.wait_now("the ranks had caught up with the issued commands")
            team.is_lost |= any(peer.link is None for peer in team.peers)

    def wait_now(self, what: str) -> None:
        """Handle messages, waiting a moment for them, without `await`.

        Raises:
            trio.TooSlowError: The deadline of the task has passed.
        """
        seconds = limits.SIGNAL_SECONDS
        if trio.lowlevel.in_trio_task():
            left = trio.current_effective_deadline() - trio.current_time()
            if left <= 0:
                raise trio.TooSlowError(f"the deadline passed before {what}")
            seconds = min(left, seconds)
        self.proc.pump(seconds)

    def post_around(self, team: Team) -> None:
        """Send the issued commands of all teams that share ranks with this one, without handling replies."""
        for other in self._by_number.values():
            if other is not team and other.stream and team.shares_order(other):
                self._post(other)

    def post(self, team: Team) -> None:
        """Send the issued commands of a team, without handling replies."""
        self._post(team)

    def _post(self, team: Team) -> None:
        first, stream, bodies = team.take()
        # Bodies belong to their command and are never written to, so no task has to wait until they are sent.
        self._send(team.peers, messages.Run(self.number, team.number, first, stream), bodies)

    def _send(self, peers: Sequence[Peer], message: messages.AnyMessage, bodies: Sequence[Any] = ()) -> None:
        self.proc.services.cast(peers, TENSORS, messages.encode(message), bodies)

    # ---- values ----------------------------------------------------------------------------------------------

    def ask(self, team: Team, places: Sequence[int], issue: Callable[[int], object], expected: Expected) -> RankRequest:
        """Make a request to the ranks at some places; `issue(number)` issues the command that makes them answer."""
        request = self._request(team, places, expected)
        try:
            issue(request.number)
            self.flush_team(team)
        except BaseException:
            self._requests.pop(request.number, None)
            raise
        return request

    def fetch(
        self, team: Team, refs: list[int], places: Sequence[int], expected: Expected, *, is_large: bool = False
    ) -> RankRequest:
        """Request tensors from the ranks at some places of a team, as they are after all issued commands.

        Raises:
            RecordingError: A function is being recorded.
            Exception: See `Team.emit`.
        """
        team.begin()
        if self.shapes.recorder is not None:
            raise self.shapes.recorder.looked(refs, issuing_line())
        if team.stream:
            self._post(team)
        while len(self._requests) > limits.TENSOR_COMMANDS_AHEAD:
            self.wait_now("the ranks had answered earlier requests")
        request = self._request(team, places, expected)
        self._send(list(request.waiting), messages.Fetch(self.number, team.number, request.number, refs, is_large))
        return request

    def _request(self, team: Team, places: Sequence[int], expected: Expected) -> RankRequest:
        request = RankRequest(self.shapes.new_number(), team, expected, {team.peers[place]: place for place in places})
        self._requests[request.number] = request
        return request

    def failure(self, team: int, number: int) -> TeamFailure | None:
        """Return the record of a failed command of any mesh, as tensors move between meshes."""
        for engine in self.engines.values():
            found = engine._by_number.get(team)
            if found is not None:
                return found.failure(number)
        return None

    def forget(self, request: RankRequest) -> None:
        """Release memory that ranks lend for a request, after it was read or its waiter was cancelled."""
        request.is_left = True
        for peer in request.lent:
            self._leave(peer, request.number)
        request.lent.clear()
        if request.number in self._unread:
            self._unread.discard(request.number)
            self._progress.set()

    def _leave(self, peer: Peer, number: int) -> None:
        moves_of(self.proc).leave(peer, self.number, (self.proc.proc_id, number))

    # ---- messages --------------------------------------------------------------------------------------------

    def done(self, peer: Peer, message: messages.Done) -> None:
        """Handle a progress report."""
        team = self._by_number.get(message.team)
        if team is None and message.team in self._lost_numbers:
            return  # a lost team: its living ranks go on with commands that they have received
        if team is None or peer not in team.peers:
            raise ProtocolError(f"a progress report must be of a team of the sender, got {message.team}")
        if not 0 <= message.count <= team.issued:
            raise ProtocolError(f"at most the {team.issued} issued commands can be executed, got {message.count}")
        team.progressed(peer, message.count, message.failed)
        self._progress.set()

    def replied(
        self,
        peer: Peer,
        message: messages.TensorReply | messages.Fetched,
        bodies: list[memoryview],
        carried: CarriedPorts | None,
    ) -> None:
        """Handle the reply of a rank."""
        request = self._requests.get(message.request)
        answer: _Answer | bytes
        if isinstance(message, messages.Fetched):
            lent, answer = None, message.data
        else:
            lent, answer = message.lent, (*take_payload(message.payload, bodies), message.failed_at, carried)
        if request is not None and not self.settle(request, peer, answer):
            raise ProtocolError(f"a rank must answer each request once, got another answer to {message.request}")
        if lent is not None and (request is None or request.is_left):
            self._leave(peer, message.request)
        elif lent is not None and request is not None:
            request.lent[peer] = lent
            self._unread.add(request.number)

    def settle(self, request: RankRequest, peer: Peer, answer: _Answer | bytes | Exception) -> bool:
        """Record the answer of a rank to a request; return False if none was expected."""
        place = request.waiting.pop(peer, None)
        if place is None:
            return False
        request.answers[place] = answer
        if not request.waiting:
            self._requests.pop(request.number, None)
            self._progress.set()
            request.complete.set()
        return True

    def refused(self, peer: Peer, why: str) -> None:
        """Handle the refusal of a process that cannot hold tensors."""
        if peer in self._opened:
            self._refusals[peer] = f"a process of {self.name} cannot hold tensors: {why}"
            self._lose(peer, MeshError(self._refusals[peer]))

    def gone(self, peer: Peer) -> None:
        """Handle the end of a process: the tensors of its teams are lost."""
        assert peer.death is not None
        self._refusals.pop(peer, None)
        self._lose(peer, peer.death(maybe_executed=True))

    def _lose(self, peer: Peer, error: Exception) -> None:
        if peer not in self._opened:
            return
        self._opened.discard(peer)
        for number, team in list(self._by_number.items()):
            if peer in team.peers:
                team.is_lost = True
                self._warn_of(team)
                if team.stream:  # `Lost` ends its groups, and the next team reuses their names
                    self._post(team)
                self._send(team.peers, messages.Lost(self.number, number))
                del self._by_number[number]
                self._lost.append(team)
                self._lost_numbers.add(number)
        for request in list(self._requests.values()):
            self.settle(request, peer, error)
        self._progress.set()

    # ---- interface for the owning block ------------------------------------------------------------------------

    @property
    def info(self) -> MeshInfo:
        return self.owned.info

    def abandon(self) -> None:
        """Refuse all further operations."""
        if not self.is_closed:
            self.flush()
            self.is_closed = True

    def cancel_background(self, reason: str) -> None:
        """Do nothing: issued commands are executed, or end with their rank."""

    async def drain(self) -> list[Exception]:
        """Wait until all issued commands are executed and all requested values are here (rule M3)."""
        await trio.lowlevel.checkpoint()
        while self._requests or self._unread or any(t.executed < t.issued for t in self._by_number.values()):
            self._progress = trio.Event()
            with trio.move_on_after(limits.TENSOR_DRAIN_SECONDS) as patience:
                await self._progress.wait()
            if patience.cancelled_caught:
                _log.warning("leaving %s waits for its ranks:\n%s", self.name, "\n".join(self._awaited()))
                await self._progress.wait()
        return []

    def _awaited(self) -> list[str]:
        """Describe the commands in execution, with the ranks that lag behind."""
        lines: list[str] = []
        for team in self._by_number.values():
            if team.executed == team.issued:
                continue
            behind = [origin for peer, origin in zip(team.peers, team.origins, strict=True) if team.is_behind(peer)]
            names = ", ".join(place_name(self.name, one.point) for one in behind)
            lines.append(
                f"  {names} of {len(team.peers)} execute what was issued at {team.awaited_line}, or soon after it; if "
                f"that is a collective that the other ranks did not call, it fails after "
                f"{limits.COLLECTIVE_SECONDS:.0f} s"
            )
        return lines

    async def stop(self, deadline: float) -> list[Exception]:
        """Drop all state; the block stops the processes after this."""
        del deadline
        await trio.lowlevel.checkpoint()
        for team in self._by_number.values():
            self._warn_of(team)
        self.on_closed(self)
        return []

    def kill_now(self) -> None:
        """Do nothing: the engine has no tasks that wait for ranks."""

    def _warn_of(self, team: Team) -> None:
        """Warn of failures that were never raised."""
        untold = [failure for failure in team.failed.values() if not failure.is_told and failure.what]
        if untold:
            lines = "\n".join(f"  {failure.what}, issued at {failure.line}" for failure in untold[:_WARNED_MAX])
            more = f"\n  and {len(untold) - _WARNED_MAX} more" if len(untold) > _WARNED_MAX else ""
            _log.warning(
                "%d operations on %s have failed, and nothing that depends on them was fetched:\n%s%s",
                len(untold), team.name, lines, more,
            )  # fmt: skip


# ---- answers ---------------------------------------------------------------------------------------------------------

# Waits for the answers of ranks, with or without `await` (rule N2); combines them into values or one error.


async def answers(request: RankRequest) -> Mapping[int, Any]:
    """Wait until every rank has answered; return the values by place in the team.

    Raises:
        MeshErrorGroup: A requested value could not be computed, or a process has ended.
    """
    engine = request.team.engine
    try:
        await request.complete.wait()
    finally:
        engine.forget(request)
    return values_of(request)


def answers_now(request: RankRequest) -> Mapping[int, Any]:
    """Wait for the answers without `await`, in the native library; no other task runs meanwhile.

    Raises:
        MeshErrorGroup: See `answers`.
        trio.TooSlowError: The deadline of the calling task has passed.
        DeadlockError: The value needs an actor of this process, which cannot run meanwhile.
        RuntimeError: The mesh is simulated.
    """
    engine = request.team.engine
    proc = engine.proc
    engine.stuck.clear()
    watch = _Watch(engine)
    try:
        while request.waiting:
            if proc.is_simulated:
                raise RuntimeError(
                    "in a simulation, a mesh tensor's value must be fetched with `await`, got a use that blocks, as "
                    "float(t) or print(t): write `await trimesh.fetch(t)`"
                )
            engine.wait_now("a value of a mesh tensor had arrived")
            for peer, place in list(request.waiting.items()):
                watch.look_at(peer)
                if peer.link is None:  # tasks, which do not run now, would find out how it ended
                    engine.settle(request, peer, death_at(request.team, place))
    finally:
        proc.deadlocks.end_search_now()
        engine.forget(request)
    return values_of(request)


@attrs.define(eq=False)
class _Watch:
    """Detects waits for ranks that wait for actors of this process, which cannot run until the wait is over.

    Attributes:
        engine: Engine of the ranks.
    """

    engine: Engine
    _search: BlockedSearch | None = None

    def look_at(self, peer: Peer) -> None:
        """Check the waits that a rank has reported.

        Raises:
            DeadlockError: The rank waits for an actor of this process.
        """
        deadlocks = self.engine.proc.deadlocks
        stuck = self.engine.stuck.pop(peer, None)
        for call_id in () if stuck is None else stuck.calls:
            call = peer.inbound.get(call_id)
            if call is not None and not call.ended:
                raise self._error(call)
        waits = () if stuck is None else [ref for ref in stuck.waits if ref.proc == peer.proc_id]
        if waits and self._search is None:  # through other processes: query them; the rank reports again
            self._search = deadlocks.search_now(waits)
        if self._search is not None:
            call = self._search.go_on()
            if call is not None:
                raise self._error(call)
            if self._search.search.is_done:
                self._search = None

    def _error(self, call: IncomingCall) -> DeadlockError:
        cell = self.engine.proc.cells.get(call.mesh)
        cycle = [] if cell is None else [(class_of(cell.spec.cls).__qualname__, call.spec.name, cell.spec.point)]
        name = call.spec.name if cell is None else f"{cell.spec.name}.{call.spec.name}()"
        return DeadlockError(
            f"a value that needs an actor of this process must be fetched with `await`, got one that waits for {name}: "
            "write `await trimesh.fetch(t)`",
            cycle=cycle,
        )


def values_of(request: RankRequest) -> Mapping[int, Any]:
    """Return the values of a complete request, by place; raise as `answers` does."""
    team = request.team
    found: dict[int, Any] = {}
    deaths: list[Exception] = []
    errors: list[Exception] = []
    for place, answer in sorted(request.answers.items()):
        if isinstance(answer, Exception):
            set_origin(answer, team.origins[place])
            deaths.append(answer)
            continue
        carried = None
        try:
            if isinstance(answer, bytes):
                found[place] = request.expected.unpacked(answer)
                continue
            payload, bodies, failed_at, carried = answer
            if failed_at is None:
                found[place] = _value(request, place, payload, bodies)
            else:
                errors.append(_failure(team.engine, payload, *failed_at))
        except (PayloadError, ProtocolError) as error:
            set_origin(error, team.origins[place])
            errors.append(error)
        del carried
    if deaths or errors:
        causes = causes_first(team, deaths, errors)
        raise MeshErrorGroup(f"a tensor on {team.name} could not be computed", causes, mesh=team.engine.name)
    return found


def _value(request: RankRequest, place: int, payload: Buffer, bodies: Sequence[memoryview]) -> Any:
    """Decode the value that a rank has sent.

    Raises:
        PayloadError: A user's object in it cannot be rebuilt here.
        ProtocolError: The value is not an answer to the request.
    """
    expected = request.expected
    try:
        value = request.team.engine.proc.values.decode(payload, bodies, what="a value of a mesh tensor")
    except PayloadError as error:
        if not expected.is_ours:
            raise
        raise ProtocolError(f"a rank must answer with {expected.what}, got undecodable bytes: {error}") from error
    if not expected.fits(value, place):
        raise ProtocolError(f"a rank must answer with {expected.what}, got {value!r:.100}")
    return value


def _failure(engine: Engine, payload: Buffer, team: int, number: int) -> Exception:
    """Decode the error of a rank that could not compute a value, and add the line that issued the failed command.

    Raises:
        ProtocolError: The payload is not an exception.
    """
    error = engine.proc.values.decode_error(payload)
    failure = engine.failure(team, number)
    if failure is not None:
        failure.is_told = True
        add_note(error, f"issued at {failure.line}")
    return error


# ---- root causes and follow-on errors across ranks (rule N3) ---------------------------------------------------------


def causes_first(team: Team, deaths: Sequence[Exception], errors: Sequence[Exception]) -> list[Exception]:
    """Return the errors of a team's ranks, root causes first, without follow-on errors of deaths.

    Args:
        team: The ranks.
        deaths: Errors for the ranks that have ended.
        errors: Errors that the other ranks have sent.
    """
    victims = [(error, root) for error in errors if (root := _victim(error)) is not None]
    if victims and deaths:
        deaths[0].__context__ = deaths[0].__context__ or victims[0][0]
        left_out = {id(error) for error, _ in victims}
        errors = [error for error in errors if id(error) not in left_out]
    elif victims and (death := _death_in(team)) is not None:
        for _, root in victims:
            death.__cause__ = death.__cause__ or root.__cause__  # where the rank was
            root.__cause__ = death
    return [*deaths, *sorted(errors, key=lambda error: isinstance(error, CollectiveFailed))]


def death_at(team: Team, place: int) -> Exception:
    """Return the error for the ended process at a place of a team."""
    peer = team.peers[place]
    if peer.death is None:  # tasks have not found out how it ended
        return unexplained_death(team.name, team.origins[place])
    error = peer.death(maybe_executed=True)
    set_origin(error, team.origins[place])
    return error


def _victim(error: BaseException) -> CollectiveFailed | None:
    """Return the first error in a chain of ranks that waited for each other, if a death has caused it."""
    while isinstance(error, CollectiveFailed):
        if str(error) == PROCESS_ENDED:
            return error
        if error.__cause__ is None:
            break
        error = error.__cause__
    return None


def _death_in(team: Team) -> Exception | None:
    places = (place for place, peer in enumerate(team.peers) if peer.death is not None or peer.link is None)
    return next((death_at(team, place) for place in places), None)
