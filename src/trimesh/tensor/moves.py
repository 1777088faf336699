"""Tensors on their way between ranks, in one process: what it has for others, and what it waits for.

    source                                          target
      a copy, in memory that others can map
      Offer: the handle of that memory --------->   reads it, when its own commands say so
      <------------------------------------ Taken
      the memory goes back

A small one rides in the offer. Everything here runs in Trio's thread, but for `kept`, which is the rank's own. Nothing
can wait in a ring: the controller issues both halves of a move one after the other, so that each waits only for what
was issued before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import trio

from trimesh import limits
from trimesh._runtime.bulk import Registration
from trimesh._runtime.services import TENSORS
from trimesh._transport.mover import Kind, Right, Span, Transfer
from trimesh.errors import LimitExceeded, Origin, ProtocolError
from trimesh.ids import ProcId
from trimesh.rdma.handle import Handle, handle_of
from trimesh.rdma.memory import memory_of
from trimesh.tensor import protocol
from trimesh.tensor.rank import Poison

if TYPE_CHECKING:
    from trimesh._runtime.peer import Peer
    from trimesh._runtime.proc import Proc

Move = tuple[ProcId, int]
"""The controller, and the number that it has given to the move."""


@attrs.define(eq=False)
class _Lent:
    """Memory that others read.

    Attributes:
        registration: It.
        readers: Those that have not said that they are done.
    """

    registration: Registration
    readers: dict[Peer, None]


@attrs.define(eq=False)
class _Expected:
    """What one source has, or will have, for this process.

    Attributes:
        came: Set when it has come, or its source is gone.
        offer: What has come, with its body.
    """

    came: trio.Event = attrs.field(factory=trio.Event)
    offer: tuple[protocol.Offer, memoryview | None] | None = None


@attrs.define(eq=False)
class Moves:
    """All of one process.

    Attributes:
        proc: The process.
        kept: What a rank here has sent to itself, by move; of the rank's thread.
    """

    proc: Proc
    kept: dict[Move, Any] = attrs.field(factory=dict[Move, Any])
    _lent: dict[Move, _Lent] = attrs.field(factory=dict[Move, _Lent])
    _lent_bytes: int = 0
    _room: trio.Event = attrs.field(factory=trio.Event)
    _expected: dict[tuple[Move, ProcId], _Expected] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.proc.on_gone.append(self._gone)

    # ---- the source ------------------------------------------------------------------------------------------

    async def stage(self, nbytes: int) -> memoryview:
        """Return memory for a copy that others will read; wait while too much has not been read yet."""
        while self._lent_bytes + nbytes > limits.TENSOR_MOVE_BYTES and self._lent:
            self._room = trio.Event()
            await self._room.wait()
        self._lent_bytes += nbytes
        with contextlib.suppress(LimitExceeded, OSError):  # it is faster there, and works elsewhere
            return self.proc.bulk.take_block(nbytes)
        return memoryview(bytearray(nbytes))

    def send(self, move: Move, engine: int, targets: Sequence[ProcId], what: Any, origin: Origin) -> None:
        """Offer something to other processes.

        Args:
            move: Which.
            engine: Of the source.
            targets: The processes.
            what: A `memoryview` from `stage`; bytes that are few; or a `Poison`.
            origin: Of the source, for an error.
        """
        self.proc.serve(self._send, move, engine, targets, what, origin)

    async def _send(self, move: Move, engine: int, targets: Sequence[ProcId], what: Any, origin: Origin) -> None:
        peers = [self.proc.peer(target) for target in targets]
        family = self.proc.family
        assert family is not None, "a rank is of a process with a family"
        await family.connect(peers)
        living = [peer for peer in peers if peer.link is not None]
        controller, number = move
        values = self.proc.values
        if isinstance(what, memoryview):
            try:
                what = self._lend(move, what, living)
            except (LimitExceeded, trio.ClosedResourceError) as error:
                self._lent_bytes -= what.nbytes
                what = Poison(-1, -1, "trimesh::send", error)
        if isinstance(what, Poison):
            encoded = values.encode_error(what.error, origin)
            for peer in living:
                peer.prepare(encoded.definitions, encoded.attachments)
            poison = (what.team, what.number, what.what)
            self._cast(living, protocol.Offer(engine, controller, number, poison=poison), encoded.payload)
        elif isinstance(what, Handle):
            self._cast(living, protocol.Offer(engine, controller, number, what.fields()))
        else:
            self._cast(living, protocol.Offer(engine, controller, number), what)

    def _lend(self, move: Move, memory: memoryview, readers: Sequence[Peer]) -> Handle:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        span = Span(flat.data_ptr(), memory.nbytes, memory)
        registration = self.proc.bulk.register(span, Right.READ)
        self._lent[move] = _Lent(registration, dict.fromkeys(readers))
        handle = Handle(registration.granted(Right.READ), span.address, 0, span.nbytes, Right.READ)
        if not readers:
            self._take_back(move)
        return handle

    def taken(self, peer: Peer, message: protocol.Taken) -> None:
        """Learn that a reader needs what it was offered no more."""
        move = ProcId(message.controller), message.move
        lent = self._lent.get(move)
        if lent is not None:
            lent.readers.pop(peer, None)
            if not lent.readers:
                self._take_back(move)

    def _take_back(self, move: Move) -> None:
        registration = self._lent.pop(move).registration
        self._lent_bytes -= registration.span.nbytes
        registration.revoke()
        self._room.set()

    def _cast(self, peers: Sequence[Peer], message: protocol.AnyMessage, body: bytes | None = None) -> None:
        self.proc.services.cast(peers, TENSORS, protocol.encode(message), [body] if body else [])

    # ---- the target ------------------------------------------------------------------------------------------

    async def receive(self, move: Move, source: ProcId, destination: torch.Tensor) -> Poison | None:
        """Wait for what another process has for this one, and copy it here.

        Args:
            move: Which.
            source: The process.
            destination: Contiguous, on the CPU.

        Returns:
            What had failed there, if it is that.

        Raises:
            ProcDied, MeshStopped: The source has ended.
        """
        peer = self.proc.peer(source)
        key = move, source
        expected = self._expected.setdefault(key, _Expected())
        try:
            family = self.proc.family
            assert family is not None, "a rank is of a process with a family"
            await family.connect([peer])  # by that link its end is seen
            if peer.death is None:
                await expected.came.wait()
        finally:
            self._expected.pop(key, None)
        if expected.offer is None:
            assert peer.death is not None
            raise peer.death(maybe_executed=True)
        offer, body = expected.offer
        if offer.poison is not None:
            return Poison(*offer.poison, self.proc.values.decode_error(b"" if body is None else body))
        if offer.handle is None:
            _copy(body, destination)
            return None
        try:
            await self._read(handle_of(*offer.handle), destination)
        finally:
            self._cast([peer] if peer.link is not None else [], protocol.Taken(offer.engine, *move))
        return None

    async def _read(self, handle: Handle, destination: torch.Tensor) -> None:
        span = memory_of(destination, "what a tensor moves to").span
        if span.nbytes != handle.nbytes:
            raise ProtocolError(f"a tensor of {span.nbytes} bytes must be offered whole, got {handle.nbytes} bytes")
        granted = handle.granted
        await self.proc.bulk.move(granted, Transfer(Kind.READ, granted.grant, handle.offset, span))

    def offered(self, peer: Peer, message: protocol.Offer, bodies: list[memoryview]) -> None:
        """Take what another process has for this one; it may come before anybody here asks for it."""
        key = (ProcId(message.controller), message.move), peer.proc_id
        expected = self._expected.setdefault(key, _Expected())
        if expected.offer is not None or len(bodies) > 1:
            raise ProtocolError(f"a tensor must be offered once, with one body at most, got move {message.move} again")
        expected.offer = message, bodies[0] if bodies else None
        expected.came.set()

    # ---- ends ------------------------------------------------------------------------------------------------

    def _gone(self, peer: Peer) -> None:
        for move, lent in list(self._lent.items()):
            lent.readers.pop(peer, None)
            if not lent.readers or move[0] == peer.proc_id:
                self._take_back(move)
        for key, expected in list(self._expected.items()):
            (controller, _), source = key
            if controller == peer.proc_id:
                del self._expected[key]
            elif source == peer.proc_id:
                expected.came.set()


def _copy(body: memoryview | None, destination: torch.Tensor) -> None:
    nbytes = destination.numel() * destination.element_size()
    came = 0 if body is None else body.nbytes
    if came != nbytes:
        raise ProtocolError(f"a tensor of {nbytes} bytes must be offered whole, got {came} bytes")
    if body is not None:
        destination.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(body, dtype=torch.uint8))


def open_moves(proc: Proc) -> None:
    """Let a process send and receive tensors."""
    proc.above[Moves] = Moves(proc)


def moves_of(proc: Proc) -> Moves:
    """Return the tensors on their way in a process."""
    found = proc.above[Moves]
    assert isinstance(found, Moves)
    return found
