"""Tensor moves of one process: tensors that it offers to others, and offers that it waits for.

    source                                          target
      copies the tensor into memory that others can map
      Offer: the handle of that memory --------->   reads it when its own commands reach that point
      <------------------------------------ Taken
      frees the memory

Small tensors are sent inside the offer. Tensors from or to the controller are lent in the same way; the command or the
reply carries the handle. If no carrier connects the two processes, the target answers `is_unread`, and the source sends
an offer with all bytes in it.

Everything here runs in Trio's thread, except `kept`, which belongs to the rank's thread. Moves cannot deadlock. The
controller issues both halves of a move one after the other, so each waits only for commands issued before it. Pipelines
issue commands in between: either the controller has checked that room for one copy is enough for their order, or the
source does not wait for room.
Memory for the controller never waits for room: the controller may be waiting without `await`, and reads nothing then.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import torch
import trio

from trimesh import limits
from trimesh._runtime.services import TENSORS, Registration
from trimesh._transport.interface import Right, Span, Transfer, TransferKind
from trimesh._wire.memory import memory_at
from trimesh.errors import LimitExceeded, LinkLost, Origin, ProtocolError
from trimesh.ids import ProcId
from trimesh.rdma.memory.handle import Handle, handle_of
from trimesh.rdma.memory.local import address_of, memory_of
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.arguments import new_tensor
from trimesh.tensor.protocol.placement import Box
from trimesh.tensor.rank.kernel import NO_COMMAND, Poison
from trimesh.tensor.rank.rank import Rank

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer


Move = tuple[ProcId, int]
"""The controller, and its number for the move, or for the request that the move answers."""

Piece = tuple[int, torch.Tensor]
"""Offset in lent memory, in bytes, and the contiguous CPU tensor to fill from there."""


@attrs.define(eq=False)
class _Lent:
    """Memory that other processes read.

    Attributes:
        registration: Grant of the memory.
        memory: The memory.
        readers: Processes that have not released it.
    """

    registration: Registration
    memory: memoryview
    readers: dict[Peer, None]


@attrs.define(eq=False)
class _Expected:
    """An expected offer of one source.

    Attributes:
        came: Set when the offer has arrived, or its source has ended.
        offer: The offer, with its body.
    """

    came: trio.Event = attrs.field(factory=trio.Event)
    offer: tuple[messages.Offer, memoryview | None] | None = None


@attrs.define(eq=False)
class Moves:
    """All moves of one process.

    Attributes:
        proc: The process.
        kept: Tensors that a rank here has sent to itself, by move; for the rank's thread only.
        lent_bytes: Bytes that others may read now.
    """

    proc: Proc
    kept: dict[Move, Any] = attrs.field(factory=dict[Move, Any])
    lent_bytes: int = 0
    _lent: dict[Move, _Lent] = attrs.field(factory=dict[Move, _Lent])
    _room: trio.Event = attrs.field(factory=trio.Event)
    _expected: dict[tuple[Move, ProcId], _Expected] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.proc.on_gone.append(self._gone)

    # ---- the source ------------------------------------------------------------------------------------------

    async def stage(self, nbytes: int, waits: bool = True) -> memoryview:  # noqa: FBT001, FBT002 - by position
        """Return memory for a copy that others will read.

        Args:
            nbytes: Size.
            waits: Whether to wait while too many lent bytes are unread; if not, the controller bounds the number of
                moves in progress.
        """
        await trio.lowlevel.checkpoint()
        while waits and self._is_full(nbytes):
            if self._room.is_set():
                self._room = trio.Event()
            await self._room.wait()
        return self._take(nbytes)

    async def stage_if_room(self, nbytes: int) -> memoryview | None:
        """Call `stage_now`, for the thread of a rank."""
        await trio.lowlevel.checkpoint()
        return self.stage_now(nbytes)

    def stage_now(self, nbytes: int) -> memoryview | None:
        """Return memory for a copy that others will read, or None if too many lent bytes are unread."""
        return None if self._is_full(nbytes) else self._take(nbytes)

    def _is_full(self, nbytes: int) -> bool:
        return bool(self._lent) and self.lent_bytes + nbytes > limits.TENSOR_MOVE_BYTES

    def _take(self, nbytes: int) -> memoryview:
        self.lent_bytes += nbytes
        with contextlib.suppress(LimitExceeded, OSError):  # a block is faster; ordinary memory works, too
            return self.proc.bulk.take_block(nbytes)
        return memoryview(bytearray(nbytes))

    def send(
        self, move: Move, engine: int, targets: Sequence[ProcId], what: Any, origin: Origin, part: Any = None
    ) -> None:
        """Offer a tensor or its error to other processes.

        Args:
            move: The move.
            engine: Engine of the source.
            targets: The processes.
            what: A `memoryview` from `stage`; a few bytes; or a `Poison`.
            origin: Origin of the source, for an error.
            part: See `Offer`.
        """
        self.proc.serve(self._send, move, engine, targets, what, origin, part)

    async def _send(
        self, move: Move, engine: int, targets: Sequence[ProcId], what: Any, origin: Origin, part: Any
    ) -> None:
        peers = [self.proc.peer(target) for target in targets]
        family = self.proc.family
        assert family is not None, "a rank is of a process with a family"
        await family.connect(peers)
        living = [peer for peer in peers if peer.link is not None]
        controller, number = move
        values = self.proc.values
        if isinstance(what, memoryview):
            try:
                what = self.lend(move, what, living)
            except (LimitExceeded, trio.ClosedResourceError) as error:
                what = Poison(-1, -1, "trimesh::send", error)
        if isinstance(what, Poison):
            encoded = values.encode_error(what.error, origin)
            for peer in living:
                peer.prepare(encoded.definitions, encoded.attachments)
            poison = (what.team, what.number, what.what)
            self._cast(living, messages.Offer(engine, controller, number, poison=poison), encoded.payload)
        elif isinstance(what, Handle):
            self._cast(living, messages.Offer(engine, controller, number, what.fields(), part=part))
        else:
            self._cast(living, messages.Offer(engine, controller, number, part=part), what)

    def lend(self, move: Move, memory: memoryview, readers: Sequence[Peer]) -> Handle:
        """Let processes read memory until each has released it or ended.

        Args:
            move: The move that they name to release it.
            memory: From `stage` or `stage_now`.
            readers: The processes.

        Raises:
            LimitExceeded: This process has `limits.GRANTS_MAX` buffers.
            trio.ClosedResourceError: This process is ending.
        """
        span = Span(address_of(memory), memory.nbytes, memory)
        try:
            # Readers end the registration, not the calling actor: register in a context without an actor.
            registration = contextvars.Context().run(self.proc.bulk.register, span, Right.READ)
        except BaseException:
            self.unstage(memory)
            raise
        self._lent[move] = _Lent(registration, memory, dict.fromkeys(readers))
        handle = Handle(registration.granted(Right.READ), span.address, 0, span.nbytes, Right.READ)
        if not readers:
            self.take_back(move)
        return handle

    def unstage(self, memory: memoryview) -> None:
        """Give back memory that was never lent."""
        self.lent_bytes -= memory.nbytes
        self._room.set()

    def taken(self, peer: Peer, message: messages.Taken) -> None:
        """Handle `Taken`: release the memory, or send the bytes in a message to a reader that cannot read it."""
        move = ProcId(message.controller), message.move
        lent = self._lent.get(move)
        if lent is None or peer not in lent.readers:
            return
        if message.is_unread:
            offer = messages.Offer(message.engine, message.controller, message.move)
            self._cast([peer], offer, bytes(lent.memory))
        del lent.readers[peer]
        if not lent.readers:
            self.take_back(move)

    def take_back(self, move: Move) -> None:
        """End the loan of a move, if it has not ended."""
        lent = self._lent.pop(move, None)
        if lent is not None:
            self.lent_bytes -= lent.memory.nbytes
            lent.registration.revoke()
            self._room.set()

    def _cast(self, peers: Sequence[Peer], message: messages.AnyMessage, body: bytes | None = None) -> None:
        self.proc.services.cast(peers, TENSORS, messages.encode(message), [body] if body else [])

    # ---- the target ------------------------------------------------------------------------------------------

    async def receive(self, move: Move, source: ProcId, destination: torch.Tensor) -> Poison | None:
        """Wait for a tensor that another process offers to this one, and copy it.

        Args:
            move: The move.
            source: The process.
            destination: Contiguous, on the CPU.

        Returns:
            The poison that was offered instead of a tensor, if any.

        Raises:
            ProcDied, MeshStopped: The source has ended.
        """
        offer, body = await self.wait_offer(move, source)
        if offer.poison is not None:
            return self.poison_of(offer, body)
        nbytes = destination.numel() * destination.element_size()
        await self.take(move, source, offer, body, [(0, destination)] if nbytes else [], nbytes)
        return None

    async def wait_offer(self, move: Move, source: ProcId) -> tuple[messages.Offer, memoryview | None]:
        """Wait for the offer of another process; return it with its body.

        Raises:
            ProcDied, MeshStopped: The source has ended.
        """
        peer = self.proc.peer(source)
        key = move, source
        expected = self._expected.setdefault(key, _Expected())
        try:
            family = self.proc.family
            assert family is not None, "a rank is of a process with a family"
            await family.connect([peer])  # the link reports its end
            if peer.death is None:
                await expected.came.wait()
        finally:
            self._expected.pop(key, None)
        if expected.offer is None:
            assert peer.death is not None
            raise peer.death(maybe_executed=True)
        return expected.offer

    def poison_of(self, offer: messages.Offer, body: memoryview | None) -> Poison:
        """Decode the poison in an offer."""
        assert offer.poison is not None
        return Poison(*offer.poison, self.proc.values.decode_error(b"" if body is None else body))

    async def take(
        self,
        move: Move,
        source: ProcId,
        offer: messages.Offer,
        body: memoryview | None,
        pieces: Sequence[Piece],
        nbytes: int,
    ) -> None:
        """Copy pieces of an offered tensor, which must have `nbytes` in all, and release it."""
        if offer.handle is None:
            _copy(body, pieces, nbytes)
            return
        await self.pull(self.proc.peer(source), offer.engine, move, offer.handle, pieces, nbytes)

    async def pull(
        self, peer: Peer, engine: int, move: Move, handle: Sequence[Any], pieces: Sequence[Piece], nbytes: int
    ) -> None:
        """Copy pieces of memory that another process has lent, and release it.

        Args:
            peer: The process.
            engine: Engine of the move.
            move: The move.
            handle: Handle of the memory, as `Handle.fields`.
            pieces: Pieces to copy.
            nbytes: Size of the lent memory.

        Raises:
            ProcDied, MeshStopped: The process has ended.
            ProtocolError: The lent memory does not have `nbytes`.
        """
        is_unread = False
        try:
            found = handle_of(*handle)
            if found.nbytes != nbytes:
                raise ProtocolError(f"a tensor of {nbytes} bytes must be lent whole, got {found.nbytes} bytes")
            for offset, destination in pieces:
                span = memory_of(destination, "the destination of a move").span
                transfer = Transfer(TransferKind.READ, found.granted.grant, found.offset + offset, span)
                await self.proc.bulk.move(found.granted, transfer)
        except LinkLost:  # no carrier between the two: request the bytes in a message
            is_unread = peer.link is not None
            if not is_unread:
                raise
        finally:
            self.leave(peer, engine, move, is_unread=is_unread)
        if is_unread:
            _, body = await self.wait_offer(move, peer.proc_id)
            _copy(body, pieces, nbytes)

    def leave(self, peer: Peer, engine: int, move: Move, *, is_unread: bool = False) -> None:
        """Release memory that another process has lent."""
        if peer.link is not None:
            controller, number = move
            self._cast([peer], messages.Taken(engine, controller, number, is_unread))

    def offered(self, peer: Peer, message: messages.Offer, bodies: list[memoryview]) -> None:
        """Handle an offer; it may arrive before it is waited for."""
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
                self.take_back(move)
        for key, expected in list(self._expected.items()):
            (controller, _), source = key
            if controller == peer.proc_id:
                del self._expected[key]
            elif source == peer.proc_id:
                expected.came.set()


def _copy(body: memoryview | None, pieces: Sequence[Piece], nbytes: int) -> None:
    came = 0 if body is None else body.nbytes
    if came != nbytes:
        raise ProtocolError(f"a tensor of {nbytes} bytes must be offered whole, got {came} bytes")
    for offset, destination in pieces:
        assert body is not None, "there are no pieces of an empty tensor"
        count = destination.numel() * destination.element_size()
        if count:  # not by torch, which warns of the read-only bytes of a message
            memory_at(destination.data_ptr(), count, destination)[:] = body[offset : offset + count]


def open_moves(proc: Proc) -> None:
    """Let a process send and receive tensors."""
    proc.above[Moves] = Moves(proc)


def moves_of(proc: Proc) -> Moves:
    found = proc.above[Moves]
    assert isinstance(found, Moves)
    return found


# ---- delivery --------------------------------------------------------------------------------------------------------

# The rank's side of large tensors to and from the controller: read from its memory, and lent for it to read.


def arrived(rank: Rank, data: memoryview, move: int, dtype: torch.dtype, size: Sequence[int], box: Box) -> torch.Tensor:
    """Return a part of a tensor that the controller sends, in new memory.

    Args:
        rank: This rank.
        data: Body of the command.
        move: Number of the move that lends the tensor, which `data` describes; 0 if `data` is the tensor's bytes.
        dtype: Dtype of the tensor.
        size: Size of the whole tensor.
        box: The part.
    """
    whole = Box.of_all(size)
    there = new_tensor(box.size, dtype)
    if not move:
        if box.count:
            flat = torch.frombuffer(data, dtype=dtype)
            there.copy_(flat.view(tuple(size))[whole.slices(box)])
        return there.to(rank.device)
    part = Part(whole, dtype, 0)
    reading = PartReading()
    reading.add(part, there, box)
    outside = rank.outside
    moves, key = moves_of(outside.proc), (outside.controller.proc_id, move)
    handle = msgspec.msgpack.decode(data)
    outside.run_in_trio(moves.pull, outside.controller, outside.engine, key, handle, reading.pieces, part.nbytes)
    reading.finish()
    return there.to(rank.device)


def unneeded(rank: Rank, move: int) -> None:
    """Release a tensor that the controller has lent, unread."""
    if move:
        outside = rank.outside
        key = outside.controller.proc_id, move
        outside.tell(moves_of(outside.proc).leave, outside.controller, outside.engine, key)


def deliver(
    rank: Rank, request: int, found: Sequence[tuple[int, Box, torch.Tensor]], command: tuple[int, int] = NO_COMMAND
) -> None:
    """Copy parts of tensors into lent memory and send the controller their description, to be read by it.

    Args:
        rank: This rank.
        request: Number of the request.
        found: For each part: index among the requested tensors, box, values.
        command: Team and number of the requesting command, if there is one.
    """
    outside = rank.outside
    try:
        parts, nbytes = lay_out((box, value.dtype) for _, box, value in found)
        memory = outside.run_in_trio(moves_of(outside.proc).stage_if_room, nbytes) if nbytes else None
        is_staged = memory is not None
        if memory is None:
            memory = memoryview(bytearray(nbytes))
        for part, (_, _, value) in zip(parts, found, strict=True):
            fill(memory, part, value.detach())
    except (RuntimeError, MemoryError, OSError) as error:  # the waiting controller needs a reply
        outside.reply(request, Poison(*command, "trimesh::fetch", error))
        return
    described = [[index, *part.fields()] for (index, _, _), part in zip(found, parts, strict=True)]
    outside.reply_lent(request, described, memory, is_staged=is_staged)


# ---- parts -----------------------------------------------------------------------------------------------------------

# Layout of tensor parts in lent memory, and reading them into their tensors.

ALIGN_BYTES: Final = 64
"""Alignment of a part: a cache line, and the widest vector load."""


@attrs.frozen
class Part:
    """A part of a tensor in lent memory.

    Attributes:
        box: Indices of the part.
        dtype: Dtype of the tensor.
        offset: Offset in bytes; the part is row-major from there.
    """

    box: Box
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.count * self.dtype.itemsize

    def fields(self) -> tuple[Any, ...]:
        """Return dtype, box and offset as plain values."""
        return list(self.box.start), list(self.box.size), str(self.dtype).removeprefix("torch."), self.offset


def part_of(fields: Any, nbytes: int) -> Part:
    """Invert `Part.fields`.

    Raises:
        ProtocolError: The fields describe no part that lies within `nbytes`.
    """
    try:
        start, size, dtype, offset = fields
        found = Part(Box(tuple(start), tuple(size)), getattr(torch, dtype), offset)
        numbers = [*start, *size, offset]
    except (TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"part of a tensor must be described by its box, type and place, got {fields!r}") from error
    if not isinstance(found.dtype, torch.dtype) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ProtocolError(f"part of a tensor must be described by whole numbers and a type, got {fields!r}")
    if len(start) != len(size) or offset + found.nbytes > nbytes:
        raise ProtocolError(f"part of a tensor must lie within the {nbytes} bytes that were lent, got {fields!r}")
    return found


def lay_out(boxes: Iterable[tuple[Box, torch.dtype]]) -> tuple[list[Part], int]:
    """Place parts one after the other; return them, and their total size in bytes."""
    parts: list[Part] = []
    at = 0
    for box, dtype in boxes:
        parts.append(Part(box, dtype, at))
        at = -(-(at + parts[-1].nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    return parts, at


def fill(memory: memoryview, part: Part, value: torch.Tensor) -> None:
    """Write a part's values to its place in memory."""
    if part.nbytes:
        flat = torch.frombuffer(memory, dtype=part.dtype, count=part.box.count, offset=part.offset)
        flat.view(part.box.size).copy_(value)


class PartReading:
    """Plan to fill tensors from lent memory: pieces to read, then copies to make.

    Attributes:
        pieces: Pieces to read.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, part: Part, target: torch.Tensor, place: Box) -> None:
        """Plan to read the overlap of a part with the box `place`, which a contiguous tensor holds."""
        common = part.box.overlap(place)
        if common is None:
            return
        begin, length = part.box.span(common)
        offset = part.offset + begin * part.dtype.itemsize
        there = target[place.slices(common)]
        if length == common.count and common.is_whole_in(place):
            self.pieces.append((offset, there))
            return
        # Read gaps as well: one larger read costs less than a read for each run of bytes.
        flat = new_tensor([length], part.dtype)
        self.pieces.append((offset, flat))
        self._later.append((there, flat.as_strided(common.size, part.box.strides())))

    def finish(self) -> None:
        """Copy pieces that were read with gaps into their tensors."""
        for target, value in self._later:
            target.copy_(value)
