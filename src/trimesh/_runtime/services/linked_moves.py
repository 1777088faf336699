"""Transfers by messages, for two processes without a common carrier: the memory's owner performs them on request.

So buffers work between any two hosts without configuration, and as securely as their other traffic. Unlike a carrier,
this costs the owner time in which it would handle messages.

    requested, piece by piece --> made by the owner's own mover --> answered

LM-1 The owner's mover checks secret, rights, range and revocation, as for any transfer (N4).
LM-2 A process has at most `limits.LINKED_PIECES` pieces requested from another at a time; the rest waits here, in
     order. A peer that requests larger ones, or leaves many more replies untaken, breaks the protocol.
LM-3 A piece is made exactly once: it is requested once, and sessions neither lose nor duplicate messages.
LM-4 A piece is made and answered in the message handler, so even while the owner's Trio loop is blocked waiting for the
     value of a tensor. An atomic operation on a word that another process is using waits for a turn of the loop.
LM-5 An abandoned transfer writes no local memory; its pieces count until they are answered.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits
from trimesh._runtime.peers.peer import Parcel
from trimesh._transport.interface import End, Grant, Span, Transfer, TransferDone, TransferError, TransferKind, UnderWay
from trimesh._wire import messages
from trimesh._wire.memory import memory_at, writable
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer

_WORD_BYTES: Final = 8
_UNTAKEN_MAX: Final = 4 * limits.LINKED_PIECES
"""Bound of untaken replies: an acknowledgement may arrive after the next request, so there is room for those."""

_WITH_BYTES: Final = (TransferKind.READ, TransferKind.WRITE)


class _Piece:
    """A requested part of a transfer.

    Attributes:
        peer: Owner of the remote memory.
        room: The peer's limit of pieces in flight; released when the piece has ended.
        local: Local memory that a read fills; None when it must no longer be written (LM-5).
        nbytes: Size of a read; 0 for other operations.
        answered: Set when it has ended.
        value: Old value of an atomic operation.
        end: Why it failed.
    """

    __slots__ = ("answered", "end", "local", "nbytes", "peer", "room", "value")

    def __init__(self, peer: Peer, room: trio.Semaphore, local: Span | None) -> None:
        self.peer = peer
        self.room = room
        self.local = local
        self.nbytes = 0 if local is None else local.nbytes
        self.answered = trio.Event()
        self.value = 0
        self.end: End | None = None

    def close(self, end: End | None) -> None:
        """Mark the piece as ended and admit the next one."""
        self.end = end
        self.answered.set()
        self.room.release()


class LinkedMoves:
    """Both sides of transfers by messages, in one process."""

    def __init__(self, proc: Proc, make: Callable[[Transfer], TransferDone | UnderWay | None]) -> None:
        """Register the message handlers of a process.

        Args:
            make: Begins a transfer of at most `limits.INLINE_BYTES_MAX` within this process; it is mostly done at
                once; see `Attachment.begin`.
        """
        self._proc = proc
        self._make = make
        self._numbers = count(1)
        self._asked: dict[int, _Piece] = {}
        self._room: dict[Peer, trio.Semaphore] = {}
        self._untaken: dict[Peer, list[trio.Event]] = {}
        proc.routes[messages.MovePiece] = self._take_question
        proc.routes[messages.PieceMoved] = self._take_answer
        proc.on_gone.append(self._gone)

    # ---- requester -------------------------------------------------------------------------------------------

    async def move(self, peer: Peer, transfer: Transfer) -> TransferDone:
        """Request a transfer from the owner of the memory, over the link to it.

        Raises:
            TransferError: The transfer failed.

        Blocking: until all pieces are answered; cancellable at once.
        """
        room = self._room.get(peer)
        if room is None:
            room = self._room[peer] = trio.Semaphore(limits.LINKED_PIECES)
        pieces = deque[_Piece]()
        value = 0
        try:
            for offset, span in _cut(transfer):
                await room.acquire()
                pieces.append(self._ask(peer, room, transfer, offset, span))
                while pieces and pieces[0].answered.is_set():
                    value = _result(pieces.popleft())
            while pieces:
                await pieces[0].answered.wait()
                value = _result(pieces.popleft())
        finally:
            for piece in pieces:
                piece.local = None
        return TransferDone(value=value)

    def _ask(self, peer: Peer, room: trio.Semaphore, transfer: Transfer, offset: int, span: Span) -> _Piece:
        kind, grant = transfer.kind, transfer.grant
        piece = _Piece(peer, room, span if kind is TransferKind.READ else None)
        bodies = [memory_at(span.address, span.nbytes, span)] if kind is TransferKind.WRITE else []
        number = next(self._numbers)
        nbytes = span.nbytes if kind in _WITH_BYTES else _WORD_BYTES
        head = messages.MovePiece(
            number,
            kind.value,
            grant.place,
            grant.generation,
            grant.secret,
            offset,
            nbytes,
            transfer.operand,
            transfer.expected,
        )
        if peer.link is None:  # the peer is gone or is going
            piece.close(End.LOST)
        else:
            self._asked[number] = piece
            peer.send(Parcel(messages.encode(head), bodies))
        return piece

    def _take_answer(self, peer: Peer, message: messages.PieceMoved, bodies: list[memoryview]) -> None:
        piece = self._asked.get(message.number)
        if piece is None or piece.peer is not peer:
            raise ProtocolError(
                f"a transfer is answered once, by the process that it was requested from, got {message.number} again "
                f"or from process {peer.proc_id}"
            )
        if message.end and message.end not in End.__members__:
            raise ProtocolError(
                f"a failed transfer must name one of {', '.join(End.__members__)}, got {message.end!r:.50}"
            )
        expected, got = 0 if message.end else piece.nbytes, sum(body.nbytes for body in bodies)
        if got != expected:
            raise ProtocolError(f"the answer to this piece of a transfer must hold {expected} bytes, got {got}")
        del self._asked[message.number]
        if not message.end and piece.local is not None:
            _fill(piece.local, bodies)
        piece.value = message.value
        piece.close(End[message.end] if message.end else None)

    def _gone(self, peer: Peer) -> None:
        self._room.pop(peer, None)
        self._untaken.pop(peer, None)
        for number in [number for number, piece in self._asked.items() if piece.peer is peer]:
            self._asked.pop(number).close(End.LOST)

    # ---- owner of the memory ---------------------------------------------------------------------------------

    def _take_question(self, peer: Peer, message: messages.MovePiece, bodies: list[memoryview]) -> None:
        expected = message.nbytes if message.kind == TransferKind.WRITE else 0
        got = sum(body.nbytes for body in bodies)
        if got != expected:
            raise ProtocolError(f"a request for this piece of a transfer must hold {expected} bytes, got {got}")
        if message.kind not in _WITH_BYTES and (message.nbytes != _WORD_BYTES or message.offset % _WORD_BYTES):
            raise ProtocolError(
                f"an atomic operation must be on {_WORD_BYTES} bytes at a multiple of {_WORD_BYTES}, "
                f"got {message.nbytes} at {message.offset}"
            )
        untaken = self._untaken[peer] = [one for one in self._untaken.get(peer, ()) if not one.is_set()]
        if len(untaken) >= _UNTAKEN_MAX:
            raise ProtocolError(f"a peer may leave at most {_UNTAKEN_MAX} answers untaken, got another request")
        made = self._made(message, bodies)
        if isinstance(made, UnderWay):
            self._proc.serve(partial(self._answer_later, peer, message.number, made))
        else:
            self._answer(peer, *made)

    def _answer(self, peer: Peer, answer: messages.PieceMoved, memory: Sequence[memoryview] = ()) -> None:
        lent = peer.send(Parcel(messages.encode(answer), memory))
        if lent is not None and peer in self._untaken:
            self._untaken[peer].append(lent)

    async def _answer_later(self, peer: Peer, number: int, under_way: UnderWay) -> None:
        """Reply when an atomic operation on a word that another process holds is done."""
        await under_way.ended.wait()
        error = under_way.error
        end = "" if error is None else error.end.name if isinstance(error, TransferError) else End.REVOKED.name
        self._answer(peer, messages.PieceMoved(number, 0 if end else under_way.done.value, end))

    def _made(
        self, asked: messages.MovePiece, bodies: list[memoryview]
    ) -> tuple[messages.PieceMoved, Sequence[memoryview]] | UnderWay:
        kind = TransferKind(asked.kind)
        given = memoryview(b"".join(bodies)) if len(bodies) > 1 else (bodies or [memoryview(b"")])[0]
        memory = writable(given) if kind is TransferKind.WRITE else memoryview(bytearray(asked.nbytes))
        grant, span, value = Grant(asked.place, asked.generation, asked.secret), _span_of(memory), 0
        try:
            for start in range(0, asked.nbytes, limits.INLINE_BYTES_MAX):
                size = min(limits.INLINE_BYTES_MAX, asked.nbytes - start)
                part = Span(span.address + start, size, span.keep)
                done = self._make(Transfer(kind, grant, asked.offset + start, part, asked.operand, asked.expected))
                if isinstance(done, UnderWay) and kind not in _WITH_BYTES:
                    return done
                if not isinstance(done, TransferDone):
                    raise TransferError(End.SILENT)
                value = done.value
        except TransferError as error:
            return messages.PieceMoved(asked.number, 0, error.end.name), ()
        except (trio.ClosedResourceError, OSError):  # this process is ending, or lacks a resource of the system
            return messages.PieceMoved(asked.number, 0, End.REVOKED.name), ()
        return messages.PieceMoved(asked.number, value, ""), [memory] if kind is TransferKind.READ else ()


def _cut(transfer: Transfer) -> list[tuple[int, Span]]:
    """Return the pieces of a transfer: remote offset and local memory."""
    if transfer.kind not in _WITH_BYTES:
        return [(transfer.offset, Span(0, 0))]
    address, nbytes, keep = transfer.local.address, transfer.local.nbytes, transfer.local.keep
    step = limits.LINKED_PIECE_BYTES
    return [
        (transfer.offset + start, Span(address + start, min(step, nbytes - start), keep))
        for start in range(0, nbytes, step)
    ]


def _result(piece: _Piece) -> int:
    if piece.end is not None:
        raise TransferError(piece.end)
    return piece.value


def _fill(local: Span, bodies: list[memoryview]) -> None:
    here = memory_at(local.address, local.nbytes, local.keep)
    at = 0
    for body in bodies:
        here[at : at + body.nbytes] = body.cast("B")
        at += body.nbytes


def _span_of(memory: memoryview) -> Span:
    import ctypes  # noqa: PLC0415 - `import trimesh` stays cheap

    held = (ctypes.c_ubyte * memory.nbytes).from_buffer(memory)
    return Span(ctypes.addressof(held), memory.nbytes, held)
