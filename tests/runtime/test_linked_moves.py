"""Transfers by messages: how they are cut, bounded and given up, and what breaks their rules (N4, E12)."""

from __future__ import annotations

from collections import deque

import pytest
import trio
import trio.testing
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import limits
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.services.linked_moves import LinkedMoves
from trimesh._transport.interface import End, Grant, Span, Transfer, TransferDone, TransferError, TransferKind, UnderWay
from trimesh._wire import messages
from trimesh._wire.memory import memory_at
from trimesh.ids import ProcId
from trimesh.rdma.memory.local import address_of

SECRET = b"s" * 16
STEP = limits.LINKED_PIECE_BYTES


class Side:
    """A process that reaches memory of another one, and what it has asked of that."""

    def __init__(self) -> None:
        self.proc = Proc(ProcId(1), RecordingTransport(), seed=1)
        self.moves = LinkedMoves(self.proc, self.make)
        self.link = RecordingLink()
        self.peer: Peer = self.proc.adopt_link(ProcId(2), self.link)
        self.taken = 0
        self.memory = bytearray(range(64))
        self.waits: UnderWay | None = None

    def make(self, transfer: Transfer) -> TransferDone | UnderWay:
        """Make a transfer on the memory of this side."""
        if self.waits is not None:
            return self.waits
        assert transfer.local.nbytes <= limits.INLINE_BYTES_MAX
        if transfer.grant.secret != SECRET:
            raise TransferError(End.DENIED)
        local = memory_at(transfer.local.address, transfer.local.nbytes, transfer.local.keep)
        there = memoryview(self.memory)[transfer.offset : transfer.offset + len(local)]
        if transfer.kind is TransferKind.READ:
            local[:] = there
        elif transfer.kind is TransferKind.WRITE:
            there[:] = local
        return TransferDone(value=7)

    def asked(self) -> list[messages.MovePiece]:
        """Return what was asked for since the last look."""
        found = [one for one in self.link.sent if isinstance(one, messages.MovePiece)]
        news, self.taken = found[self.taken :], len(found)
        return news

    def receive(self, message: messages.Message, *bodies: bytes) -> None:
        """Take a message of the peer."""
        self.proc.received(self.link, memoryview(messages.encode(message)), [memoryview(body) for body in bodies])


@pytest.fixture
def side() -> Side:
    return Side()


def transfer(kind: TransferKind, memory: bytearray, offset: int = 0) -> Transfer:
    span = Span(address_of(memoryview(memory)), len(memory), memory)
    return Transfer(kind, Grant(3, 4, SECRET), offset, span, 5, 6)


def move(
    number: int = 1, kind: int = 1, offset: int = 0, nbytes: int = 8, secret: bytes = SECRET
) -> messages.MovePiece:
    return messages.MovePiece(number, kind, 3, 4, secret, offset, nbytes, 0, 0)


async def test_transfer_is_cut_into_pieces_of_which_some_are_under_way(side: Side, autojump_clock: object) -> None:
    """LM-2: a bounded number, in order; the next goes when one has come, and bytes come to where they belong."""
    memory = bytearray((limits.LINKED_PIECES + 1) * STEP + 3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(side.moves.move, side.peer, transfer(TransferKind.READ, memory, 5))
        await trio.testing.wait_all_tasks_blocked()
        first = deque(side.asked())
        assert [one.offset for one in first] == [5 + at * STEP for at in range(limits.LINKED_PIECES)]
        last = first.pop()
        side.receive(messages.PieceMoved(last.number, 0, ""), b"l" * STEP)
        await trio.testing.wait_all_tasks_blocked()
        [after] = side.asked()
        first.append(after)
        while first:
            one = first.popleft()
            side.receive(messages.PieceMoved(one.number, 0, ""), bytes([65 + one.offset // STEP]) * one.nbytes)
            await trio.testing.wait_all_tasks_blocked()
            first.extend(side.asked())
    whole = limits.LINKED_PIECES
    expected = [bytes([65 + at]) * STEP for at in range(whole - 1)] + [b"l" * STEP, bytes([65 + whole]) * STEP]
    assert memory == b"".join(expected) + bytes([66 + whole]) * 3


async def test_given_up_transfer_is_written_no_more(side: Side) -> None:
    """LM-5: its pieces count until they are answered, and a later transfer waits for that."""
    memory = bytearray(limits.LINKED_PIECES * STEP)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(side.moves.move, side.peer, transfer(TransferKind.READ, memory))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        asked = side.asked()
        nursery.start_soon(side.moves.move, side.peer, transfer(TransferKind.READ, bytearray(1)))
        await trio.testing.wait_all_tasks_blocked()
        assert side.asked() == []
        side.receive(messages.PieceMoved(asked[0].number, 0, ""), b"x" * STEP)
        await trio.testing.wait_all_tasks_blocked()
        [later] = side.asked()
        side.receive(messages.PieceMoved(later.number, 0, ""), b"x")
    assert memory == bytearray(len(memory))


async def test_ends_and_values_come_back(side: Side) -> None:
    """What the owner says, and the owner's own end."""
    async with trio.open_nursery() as nursery:
        found = list[object]()

        async def keep(kind: TransferKind) -> None:
            try:
                found.append((await side.moves.move(side.peer, transfer(kind, bytearray(8)))).value)
            except TransferError as error:
                found.append(error.end)

        for kind in (TransferKind.ADD, TransferKind.WRITE, TransferKind.READ):
            nursery.start_soon(keep, kind)
            await trio.testing.wait_all_tasks_blocked()
        add, write, _ = side.asked()
        side.receive(messages.PieceMoved(add.number, 9, ""))
        await trio.testing.wait_all_tasks_blocked()
        side.receive(messages.PieceMoved(write.number, 0, "REVOKED"))
        await trio.testing.wait_all_tasks_blocked()
        side.moves._gone(side.peer)
    assert found == [9, End.REVOKED, End.LOST]


async def test_transfers_that_wait_for_room_end_with_their_owner(side: Side) -> None:
    """LM-2: none of those in the line waits for ever."""
    ends = list[End]()

    async def read(nbytes: int) -> None:
        with pytest.raises(TransferError) as met:
            await side.moves.move(side.peer, transfer(TransferKind.READ, bytearray(nbytes)))
        ends.append(met.value.end)

    async with trio.open_nursery() as nursery:
        for nbytes in ((limits.LINKED_PIECES + 2) * STEP, 1, 2 * STEP):
            nursery.start_soon(read, nbytes)
        await trio.testing.wait_all_tasks_blocked()
        side.peer.link = None
        side.moves._gone(side.peer)
    assert ends == [End.LOST] * 3


async def test_owner_makes_pieces_in_order_and_answers_each_at_once(side: Side) -> None:
    """LM-1, LM-4: also the one that it refuses; a large one in parts that are done at once."""
    side.memory = bytearray(range(64)) + bytes(2 * limits.INLINE_BYTES_MAX) + b"end"
    side.receive(move(1, TransferKind.WRITE, 2, 3), b"abc")
    side.receive(move(2, TransferKind.READ, 1, 5))
    side.receive(move(3, TransferKind.READ, 1, 5, b"w" * 16))
    side.receive(move(4, TransferKind.ADD))
    side.receive(move(5, TransferKind.READ, 1, len(side.memory) - 1))
    assert side.link.sent == [
        messages.PieceMoved(1, 7, ""),
        messages.PieceMoved(2, 7, ""),
        messages.PieceMoved(3, 0, "DENIED"),
        messages.PieceMoved(4, 7, ""),
        messages.PieceMoved(5, 7, ""),
    ]
    assert side.link.bodies == [[], [b"\1abc\5"], [], [], [bytes(side.memory[1:])]]
    assert not side.link.aborted


async def test_atomic_operation_that_waits_for_another_one_is_answered_later(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LM-4: when it has ended, with what was there."""
    under_way = UnderWay(transfer(TransferKind.ADD, bytearray(8)))
    side.waits = under_way
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(Proc, "serve", lambda _, task: nursery.start_soon(task))
        side.receive(move(1, TransferKind.ADD))
        side.receive(move(2, TransferKind.READ))
        await trio.testing.wait_all_tasks_blocked()
        assert side.link.sent == [messages.PieceMoved(2, 0, "SILENT")]
        under_way.end(TransferDone(value=11))
    assert side.link.sent[1:] == [messages.PieceMoved(1, 11, "")]


@pytest.mark.parametrize(
    ("wrong", "bodies"),
    [
        (move(kind=2, nbytes=8), [b"1234567"]),
        (move(kind=1, nbytes=8), [b"12345678"]),
        (move(kind=3, nbytes=4), []),
        (move(kind=4, offset=4), []),
        (messages.PieceMoved(99, 0, ""), []),
        (messages.PieceMoved(1, 0, "NO SUCH END"), []),
        (messages.PieceMoved(1, 0, ""), [b"1234567"]),
        (messages.PieceMoved(1, 0, "GONE"), [b"12345678"]),
    ],
)
async def test_peer_that_breaks_the_rules_loses_its_link(
    side: Side, wrong: messages.Message, bodies: list[bytes]
) -> None:
    """E12: and the transfer that it was asked for ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(side.moves.move, side.peer, transfer(TransferKind.READ, bytearray(8)))
        await trio.testing.wait_all_tasks_blocked()
        side.receive(wrong, *bodies)
        assert side.link.aborted
        nursery.cancel_scope.cancel()


async def test_too_many_answers_that_are_not_taken_break_the_rules(side: Side) -> None:
    """LM-2."""
    side.link.lent = trio.Event()
    for number in range(4 * limits.LINKED_PIECES):
        side.receive(move(number))
    assert not side.link.aborted
    side.receive(move(99))
    assert side.link.aborted
