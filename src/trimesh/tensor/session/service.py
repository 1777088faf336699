"""Message handling of the tensor engine in one process: commands to its ranks, replies to its controllers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import trio

from trimesh import limits
from trimesh._runtime.services import TENSORS
from trimesh._wire.memory import NotYet
from trimesh.errors import LimitExceeded, Origin, ProtocolError, ShapeError
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent
from trimesh.tensor.groups.groups import Disband
from trimesh.tensor.groups.stores import Key, Stores
from trimesh.tensor.kernels.table import KERNELS
from trimesh.tensor.kernels.values import FetchStep
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.arguments import rank_device
from trimesh.tensor.rank.kernel import NO_COMMAND, Poison
from trimesh.tensor.rank.moves import moves_of, open_moves
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rank.reader import CommandReader, SequenceReader
from trimesh.tensor.rank.runner import Runner

if TYPE_CHECKING:
    from trimesh._runtime.channels import CarriedPorts
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer
    from trimesh._transport.interface import Buffer
    from trimesh.tensor.controller.engine import Engine


@attrs.define(eq=False)
class _Hosted:
    """A rank in this process, and its connection to its controller.

    Attributes:
        proc: The process.
        controller: Process that sends the rank's commands.
        engine: Number of the engine there.
        stores: Stores of the process.
    """

    proc: Proc
    controller: Peer
    engine: int
    stores: Stores
    rank: Rank = attrs.field(init=False)
    runner: Runner = attrs.field(init=False)
    readers: dict[int, SequenceReader] = attrs.field(factory=dict[int, SequenceReader])
    _left: dict[int, BaseException] = attrs.field(factory=dict[int, BaseException])

    def open(self, message: messages.Open) -> None:
        extent = _extent(message.labels, message.sizes)
        if not 0 <= message.rank < extent.nelements:
            raise ProtocolError(f"a rank must be one of {extent!r}, got {message.rank}")
        self.rank = Rank(message.mesh, extent, message.rank, rank_device(message.rank), self)
        self.runner = Runner(self.proc, self.rank, self._progressed)

    def team(self, message: messages.NewTeam) -> None:
        extent = _extent(message.labels, message.sizes)
        ranks = message.ranks
        if self.rank.number not in ranks or not len(ranks) == len(message.procs) == extent.nelements:
            raise ProtocolError(f"a team must name its ranks, one of them the receiver, got {message!r}")
        procs = [ProcId(proc) for proc in message.procs]
        place = ranks.index(self.rank.number)
        index = sum(map(bool, procs[:place]))
        self.rank.teams[message.team] = TeamOnRank(message.team, extent, ranks, procs, index, place)
        reader = CommandReader(self.rank.device, KERNELS)
        self.readers[message.team] = SequenceReader(reader, KERNELS.local_sequence)

    def run(self, message: messages.Run, bodies: list[memoryview]) -> None:
        self.runner.put(self._team(message.team), self.readers[message.team].read(message.stream, bodies))

    def fetch(self, message: messages.Fetch) -> None:
        self.runner.put(self._team(message.team), [FetchStep(message.request, message.refs, message.is_large)])

    def _team(self, number: int) -> TeamOnRank:
        team = self.rank.teams.get(number)
        if team is None:
            raise ProtocolError(f"commands must be for a team of the rank, got {number}")
        return team

    def _progressed(self, team: TeamOnRank) -> None:
        failed = team.failed[:]
        del team.failed[: len(failed)]  # the rank's thread may append meanwhile
        self._send(messages.Done(self.engine, team.number, team.done, failed))

    def _send(self, message: messages.AnyMessage, bodies: Any = ()) -> trio.Event | None:
        return self.proc.services.cast([self.controller], TENSORS, messages.encode(message), bodies)

    # ---- interface for the rank, from its thread -------------------------------------------------------------

    def reply(self, request: int, value: Any) -> None:
        self.runner.tell(self._reply, request, value)

    def _reply(self, request: int, value: Any) -> None:
        values = self.proc.values
        failed_at = None
        if isinstance(value, Poison):
            encoded = values.encode_error(value.error, self.origin(value.what))
            failed_at = (value.team, value.number)
            team = self.rank.teams.get(value.team)  # None if the tensor was moved here from other ranks
            if team is not None:
                self._progressed(team)  # first, so that the controller still has the command's line
        else:
            try:
                encoded = values.encode(value, what="a value of a tensor program")
            except TypeError as error:
                encoded = values.encode_error(error, self.origin("trimesh::fetch"))
                failed_at = NO_COMMAND
        self.controller.prepare(encoded.definitions, encoded.attachments)
        self._send(messages.TensorReply(self.engine, request, b"", failed_at), [encoded.payload, *encoded.buffers])

    def reply_packed(self, request: int, data: bytes) -> None:
        self.runner.tell(self._send, messages.Fetched(self.engine, request, data))

    def reply_lent(self, request: int, described: list[Any], memory: memoryview, *, is_staged: bool) -> None:
        self.runner.tell(self._reply_lent, request, described, memory, is_staged)

    def _reply_lent(self, request: int, described: list[Any], memory: memoryview, is_staged: bool) -> None:  # noqa: FBT001
        moves, body, lent = moves_of(self.proc), None, None
        if is_staged:
            with contextlib.suppress(LimitExceeded):
                lent = moves.lend((self.controller.proc_id, request), memory, [self.controller]).fields()
        if lent is None:
            body = torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)
        encoded = self.proc.values.encode([described, memory.nbytes, body], what="a value of a tensor program")
        self._send(messages.TensorReply(self.engine, request, b"", None, lent), [encoded.payload, *encoded.buffers])

    def run_in_trio(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.runner.run_in_trio(function, *args)

    def ask(
        self,
        team: TeamOnRank,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        error: BaseException | None = None,
        seconds: float = limits.COLLECTIVE_SECONDS,
    ) -> messages.Answer:
        if self.proc.is_simulated:
            raise RuntimeError(
                "simulated ranks share one thread and cannot wait for each other in collectives: use processes"
            )
        told = None if error is None else (error, self.origin("a collective operation"))
        answer: messages.Answer = self.runner.run_in_trio(
            self.stores.ask, self._key(team), _store_of(team), verb, keys, values, numbers, told, seconds
        )
        return answer

    def leave(self, team: TeamOnRank, error: BaseException, *, is_waited_for: bool = True) -> None:
        if self.proc.is_simulated or sum(map(bool, team.procs)) < 2:
            return
        known = self._left.get(team.number) is error  # dependent operations repeat the same error, often many times
        self._left[team.number] = error
        here = [team.place, team.steps]
        if known and not is_waited_for:
            self.runner.tell(self.stores.leave, self._key(team), _store_of(team), here)
        else:
            self.ask(team, "leave", [], [b""] if known else [], here, None if known else error)

    def lost(self, team: int) -> None:
        """Handle the end of a process of a team."""
        self.stores.lose((self.controller.proc_id, self.engine, team))
        found = self.rank.teams.get(team)
        if found is not None:
            self.runner.put(found, [Disband()])

    def _key(self, team: TeamOnRank) -> Key:
        return self.controller.proc_id, self.engine, team.number

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        self.runner.tell(function, *args)

    def origin(self, what: str) -> Origin:
        rank, proc = self.rank, self.proc
        return Origin(rank.extent.point(rank.number), rank.mesh, None, what, proc.host_name, proc.pid)


_ELSEWHERE: Final = "an actor that gets a mesh tensor must live in a process of its ranks, got one of other processes"


@attrs.frozen
class _Mark:
    """Step that signals when all earlier steps have been executed."""

    hosted: _Hosted
    done: trio.Event

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        del rank, team
        self.hosted.tell(self.done.set)


@attrs.define(eq=False)
class TensorService:
    """Tensor engines and ranks of one process.

    Attributes:
        proc: The process.
        engines: Engines that it controls, by number.
    """

    proc: Proc
    engines: dict[int, Engine] = attrs.field(factory=dict[int, "Engine"])
    stores: Stores = attrs.field(init=False)
    _hosted: dict[tuple[ProcId, int], _Hosted] = attrs.field(factory=dict[tuple[ProcId, int], _Hosted])

    def __attrs_post_init__(self) -> None:
        open_moves(self.proc)  # before any rank's thread may ask for them
        self.stores = Stores(self.proc)
        self.proc.on_gone.append(self._gone)

    def hosted(self, controller: ProcId, engine: int) -> Rank | None:
        found = self._hosted.get((controller, engine))
        return None if found is None else found.rank

    def rebuild(self, *fields: Any) -> torch.Tensor:
        """Return the tensor of a rank of this process, as `Handler` requires; `fields` are the arguments of `_lent`."""
        if len(fields) != 5 or not all(type(field) is int for field in fields):
            raise ProtocolError(f"a mesh tensor must be named by five numbers, got {fields!r}")
        return self._lent(*fields)

    def _lent(self, controller: int, engine: int, number: int, issued: int, ref: int) -> torch.Tensor:
        """Return the local tensor of a rank in this process, for an actor that was sent the mesh tensor.

        Args:
            controller: Controller of the rank.
            engine: Number of the engine there.
            number: Number of the team.
            issued: Number of the team's commands that must be executed first.
            ref: Ref of the tensor.

        Raises:
            NotYet: These commands are not executed yet, or the tensor could not be computed; its `wait` then raises.
            TypeError: This process has no such rank.
        """
        hosted = self._hosted.get((ProcId(controller), engine))
        team = None if hosted is None else hosted.rank.teams.get(number)
        if hosted is None or team is None:
            raise TypeError(_ELSEWHERE)
        if team.done < issued:
            done = trio.Event()
            hosted.runner.put(team, [_Mark(hosted, done)])
            raise NotYet(done.wait)
        value = hosted.rank.values.get(ref)
        if isinstance(value, torch.Tensor):
            return value
        failed: BaseException = LookupError("the tensor was freed before the endpoint could take it")
        if isinstance(value, Poison):
            failed = value.error

        async def fail() -> None:
            await trio.lowlevel.checkpoint()
            raise failed

        raise NotYet(fail)

    def received(self, peer: Peer, payload: Buffer, bodies: list[memoryview], carried: CarriedPorts | None) -> None:
        message = messages.decode(payload)
        match message:
            case messages.Done():
                engine = self.engines.get(message.engine)
                if engine is not None:
                    engine.done(peer, message)
            case messages.TensorReply() | messages.Fetched():
                engine = self.engines.get(message.engine)
                if engine is not None:
                    engine.replied(peer, message, bodies, carried)
            case messages.Stuck():
                engine = self.engines.get(message.engine)
                if engine is not None:
                    engine.stuck[peer] = message
            case messages.Ask():
                self.stores.asked(peer, message)
            case messages.Answer():
                self.stores.answered(peer, message)
            case messages.Offer():
                moves_of(self.proc).offered(peer, message, bodies)
            case messages.Taken():
                moves_of(self.proc).taken(peer, message)
            case _:
                self._command(peer, message, bodies)

    def _command(
        self,
        peer: Peer,
        message: messages.Open | messages.NewTeam | messages.Run | messages.Fetch | messages.Lost,
        bodies: list[memoryview],
    ) -> None:
        if not peer.is_owner:
            raise ProtocolError("only the process that has spawned a rank may command it")
        key = peer.proc_id, message.engine
        hosted = self._hosted.get(key)
        try:
            if isinstance(message, messages.Open):
                hosted = _Hosted(self.proc, peer, message.engine, self.stores)
                hosted.open(message)
                self._hosted[key] = hosted
            elif hosted is None:
                raise ProtocolError(f"a rank must be opened before it is commanded, got {message.engine}")
            elif isinstance(message, messages.NewTeam):
                hosted.team(message)
            elif isinstance(message, messages.Fetch):
                hosted.fetch(message)
            elif isinstance(message, messages.Lost):
                hosted.lost(message.team)
            else:
                hosted.run(message, bodies)
        except ShapeError as error:
            raise ProtocolError(str(error)) from error

    def refused(self, peer: Peer, why: str) -> None:
        for engine in self.engines.values():
            engine.refused(peer, why)

    def _gone(self, peer: Peer) -> None:
        self.stores.gone(peer)
        for engine in list(self.engines.values()):
            engine.gone(peer)
        for key in [key for key in self._hosted if key[0] == peer.proc_id]:
            self._hosted.pop(key).runner.stop()


def _store_of(team: TeamOnRank) -> ProcId:
    return next(proc for proc in team.procs if proc)


def _extent(labels: list[str], sizes: list[int]) -> Extent:
    if len(set(labels)) != len(labels) or len(labels) != len(sizes):
        raise ProtocolError(f"an extent must have a size for each label, got {labels!r} and {sizes!r}")
    return Extent(dict(zip(labels, sizes, strict=True)))


def open_service(proc: Proc) -> TensorService:
    """Return the tensor engine of a process, registered for its messages."""
    found = proc.above.get(TensorService)
    if found is None:
        found = proc.above[TensorService] = TensorService(proc)
        proc.services.put(TENSORS, found)
    assert isinstance(found, TensorService)
    return found
