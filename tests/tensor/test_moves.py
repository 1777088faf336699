"""Moves of tensors between two processes, which are objects of this one: what is lent, read, released, and refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing
from tests.rows import rows

torch: Any = pytest.importorskip("torch", reason="torch is an extra")

from trimesh import limits  # noqa: E402 - after the skip
from trimesh._runtime.services import Granted  # noqa: E402
from trimesh._runtime.values.codec import Values  # noqa: E402
from trimesh._transport.interface import Grant, ProcessAddress, Right, Span, Transfer  # noqa: E402
from trimesh.errors import LimitExceeded, LinkLost, Origin, ProcDied, ProtocolError  # noqa: E402
from trimesh.ids import ProcId  # noqa: E402
from trimesh.shape.extent import Extent  # noqa: E402
from trimesh.tensor.protocol import messages  # noqa: E402
from trimesh.tensor.protocol.placement import Box  # noqa: E402
from trimesh.tensor.rank.kernel import Poison  # noqa: E402
from trimesh.tensor.rank.moves import (  # noqa: E402
    Part,
    arrived,
    deliver,
    fill,
    lay_out,
    moves_of,
    open_moves,
    part_of,
    unneeded,
)
from trimesh.tensor.rank.rank import Rank  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ORIGIN = Origin(None, "procs", pid=1)
MOVE = (ProcId(9), 5)


@attrs.define(eq=False)
class Peer:
    """A process, as others see it."""

    proc_id: ProcId
    proc: Proc
    link: object = "a link"
    death: Callable[..., BaseException] | None = None
    prepared: int = 0

    def prepare(self, *_: Any) -> None:
        self.prepared += 1


@attrs.define(eq=False)
class Lender:
    """Memory that may be read until it is revoked."""

    span: Span
    grant: Granted
    is_revoked: bool = False

    def granted(self, rights: Right) -> Granted:
        assert rights is Right.READ
        return self.grant

    def revoke(self) -> None:
        assert not self.is_revoked
        self.is_revoked = True


class Proc:
    """A process with moves; its family, its services and its memory are itself."""

    def __init__(self, net: Net, number: int) -> None:
        self.net, self.proc_id = net, ProcId(number)
        self.bulk = self.family = self.services = self
        self.values = Values(self.proc_id)
        self.on_gone: list[Callable[[Peer], None]] = []
        self.above: dict[type, Any] = {}
        self.sent: list[tuple[list[ProcId], messages.AnyMessage, list[bytes]]] = []
        self.lent: list[Lender] = []
        self.error: BaseException | None = None
        self.reads: list[tuple[int, int]] = []
        self.connected: list[ProcId] = []
        any_proc: Any = self
        open_moves(any_proc)
        self.moves = moves_of(any_proc)

    def peer(self, number: ProcId) -> Peer:
        return self.net.peers[number]

    def serve(self, function: Any, *args: Any) -> None:
        self.net.nursery.start_soon(function, *args)

    async def connect(self, peers: Sequence[Peer]) -> None:
        await trio.lowlevel.checkpoint()
        self.connected += [peer.proc_id for peer in peers]

    def cast(self, peers: Sequence[Peer], _: int, payload: bytes, bodies: Sequence[bytes]) -> None:
        message = messages.decode(payload)
        self.sent.append(([peer.proc_id for peer in peers], message, list(bodies)))
        for peer in peers:
            if isinstance(message, messages.Offer):
                peer.proc.moves.offered(self.net.peers[self.proc_id], message, [*map(memoryview, bodies)])  # type: ignore[arg-type]
            else:
                assert isinstance(message, messages.Taken)
                peer.proc.moves.taken(self.net.peers[self.proc_id], message)  # type: ignore[arg-type]

    # ---- memory ----------------------------------------------------------------------------------------------

    def take_block(self, nbytes: int) -> memoryview:
        if self.error is not None:
            raise self.error
        return memoryview(bytearray(nbytes))

    def register(self, span: Span, rights: Right) -> Lender:
        assert rights is Right.READ
        if self.error is not None:
            raise self.error
        grant = Grant(len(self.lent), 1, bytes(range(16)))
        self.lent.append(Lender(span, Granted(ProcessAddress(1, int(self.proc_id)), grant, 0, ORIGIN)))
        return self.lent[-1]

    async def move(self, granted: Granted, transfer: Transfer) -> None:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        lender = self.net.peers[ProcId(granted.home.host)].proc.lent[granted.grant.place]
        assert not lender.is_revoked
        self.reads.append((transfer.offset, transfer.local.nbytes))
        ctypes.memmove(transfer.local.address, lender.span.address + transfer.offset, transfer.local.nbytes)


class Net:
    """Two processes that move tensors, 1 and 2, and their controller."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.peers: dict[ProcId, Peer] = {}
        for number in (1, 2, 9):
            self.peers[ProcId(number)] = Peer(ProcId(number), Proc(self, number))
        self.source, self.target, self.controller = (self.peers[ProcId(number)].proc for number in (1, 2, 9))

    def died(self, number: int) -> None:
        peer = self.peers[ProcId(number)]
        peer.link, peer.death = None, lambda **_: ProcDied("it has died")
        for other in self.peers.values():
            for function in other.proc.on_gone:
                function(peer)


async def staged(proc: Proc, tensor: Any) -> memoryview:
    memory = await proc.moves.stage(tensor.nbytes)
    torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor.flatten())
    return memory


def empty(count: int = 4) -> Any:
    return torch.full([count], -1, dtype=torch.int64)


# ---- what is sent ----------------------------------------------------------------------------------------------------


async def test_lent_tensor_is_read_and_released() -> None:
    async with trio.open_nursery() as nursery:
        net, there = Net(nursery), empty()
        net.source.moves.send(MOVE, 3, [ProcId(2)], await staged(net.source, torch.arange(4)), ORIGIN)
        assert net.source.moves.lent_bytes == 32
        assert await net.target.moves.receive(MOVE, ProcId(1), there) is None
        assert there.tolist() == [0, 1, 2, 3]
        assert net.source.moves.lent_bytes == 0
        assert [one.is_revoked for one in net.source.lent] == [True]
        assert [(to, type(message)) for to, message, _ in net.source.sent] == [([2], messages.Offer)]
        assert [(to, message) for to, message, _ in net.target.sent] == [([1], messages.Taken(3, 9, 5))]
        assert net.target.moves._expected == {}
        assert (net.source.connected, net.target.connected) == ([2], [1])


async def test_small_tensor_comes_inside_its_offer_and_may_come_first() -> None:
    async with trio.open_nursery() as nursery:
        net, there = Net(nursery), empty()
        net.source.moves.send(MOVE, 3, [ProcId(2)], torch.arange(4).numpy().tobytes(), ORIGIN, ([0], None))
        await trio.testing.wait_all_tasks_blocked()
        [(_, offer, _)] = net.source.sent
        assert offer == messages.Offer(3, 9, 5, part=([0], None))
        await net.target.moves.receive(MOVE, ProcId(1), there)
        assert there.tolist() == [0, 1, 2, 3]
        assert net.target.sent == []
        net.source.moves.send(MOVE, 3, [ProcId(2)], b"", ORIGIN)
        await net.target.moves.receive(MOVE, ProcId(1), empty(0))
        assert net.source.sent[-1][2] == []


async def test_poison_is_sent_instead_of_a_tensor() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        net.source.moves.send(MOVE, 3, [ProcId(2)], Poison(7, 8, "aten::mm", KeyError("no")), ORIGIN)
        found = await net.target.moves.receive(MOVE, ProcId(1), empty())
        assert found is not None
        assert (found.team, found.number, found.what, type(found.error)) == (7, 8, "aten::mm", KeyError)
        assert net.peers[ProcId(2)].prepared == 1


async def test_processes_that_have_ended_get_nothing() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        net.died(2)
        net.source.moves.send(MOVE, 3, [ProcId(2), ProcId(9)], await staged(net.source, torch.arange(4)), ORIGIN)
        await trio.testing.wait_all_tasks_blocked()
        assert [to for to, _, _ in net.source.sent] == [[9]]
        net.source.moves.take_back(MOVE)
        net.source.moves.send(MOVE, 3, [ProcId(2)], await staged(net.source, torch.arange(4)), ORIGIN)
        await trio.testing.wait_all_tasks_blocked()
        assert net.source.moves.lent_bytes == 0  # no reader is there to release it
        assert all(one.is_revoked for one in net.source.lent)


@pytest.mark.parametrize("error", [LimitExceeded("buffers", 1), trio.ClosedResourceError("the end")])
async def test_tensor_that_cannot_be_lent_is_poisoned(error: Exception) -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        memory = await staged(net.source, torch.arange(4))
        net.source.error = error
        net.source.moves.send(MOVE, 3, [ProcId(2)], memory, ORIGIN)
        found = await net.target.moves.receive(MOVE, ProcId(1), empty())
        assert found is not None
        assert (found.team, found.number, found.what, type(found.error)) == (-1, -1, "trimesh::send", type(error))
        assert net.source.moves.lent_bytes == 0


async def test_several_readers_release_one_after_the_other() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        moves, [one, other, third] = net.source.moves, [net.peers[ProcId(number)] for number in (2, 9, 1)]
        moves.lend(MOVE, await moves.stage(8), [one, other])  # type: ignore[list-item]
        taken = messages.Taken(3, 9, 5)
        for peer, left in ((third, 8), (one, 8), (one, 8), (other, 0), (other, 0)):
            moves.taken(peer, taken)  # type: ignore[arg-type]
            assert moves.lent_bytes == left
        moves.taken(one, messages.Taken(3, 9, 77))  # type: ignore[arg-type]
        assert net.source.sent == []


async def test_ends_of_readers_and_of_the_controller_end_a_loan() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        moves, peers = net.source.moves, [net.peers[ProcId(number)] for number in (2, 9)]
        moves.lend(MOVE, await moves.stage(8), peers)  # type: ignore[arg-type]
        moves.lend((ProcId(7), 1), await moves.stage(16), peers)  # type: ignore[arg-type]
        moves.lend((ProcId(7), 2), await moves.stage(32), peers[:1])  # type: ignore[arg-type]
        moves.lend((ProcId(9), 6), await moves.stage(64), peers[:1])  # type: ignore[arg-type]
        net.died(9)
        assert [one.is_revoked for one in net.source.lent] == [True, False, False, True]
        assert moves.lent_bytes == 48
        net.died(2)
        assert moves.lent_bytes == 0
        assert [one.is_revoked for one in net.source.lent] == [True] * 4


# ---- room ------------------------------------------------------------------------------------------------------------


async def test_memory_is_taken_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_MOVE_BYTES", 16)
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        moves, peer = net.source.moves, net.peers[ProcId(2)]
        large = moves.stage_now(99)  # alone it is lent however large it is
        assert large is not None
        moves.unstage(large)
        memory = moves.stage_now(8)
        assert memory is not None
        moves.lend(MOVE, memory, [peer])  # type: ignore[list-item]
        assert await moves.stage_if_room(9) is None
        last = await moves.stage_if_room(8)
        assert (last is not None, moves.lent_bytes) == (True, 16)
        assert moves.stage_now(1) is None
        moves.take_back(MOVE)
        moves.take_back(MOVE)
        assert moves.lent_bytes == 8


@pytest.mark.parametrize("error", [LimitExceeded("blocks", 1), OSError("no room in /dev/shm")])
async def test_ordinary_memory_is_lent_if_there_is_no_block(error: Exception) -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        net.source.error = error
        memory = await net.source.moves.stage(8)
        assert (memory.nbytes, memory.readonly) == (8, False)


# ---- what is received ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_before", [False, True])
async def test_end_of_the_source_ends_the_wait(is_before: bool) -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)

        async def wait() -> None:
            with pytest.raises(ProcDied):
                await net.target.moves.wait_offer(MOVE, ProcId(1))

        if is_before:
            net.died(1)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if not is_before:
            net.died(1)
    assert net.target.moves._expected == {}


async def test_offers_of_a_controller_that_has_ended_are_dropped() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        for move in (MOVE, (ProcId(7), 5)):
            net.source.moves.send(move, 3, [ProcId(2)], b"12345678", ORIGIN)
        await trio.testing.wait_all_tasks_blocked()
        net.died(9)
        assert [key for key, _ in net.target.moves._expected] == [(7, 5)]


async def test_offer_that_came_before_its_source_has_ended_is_taken() -> None:
    async with trio.open_nursery() as nursery:
        net, there = Net(nursery), empty(1)
        net.source.moves.send(MOVE, 3, [ProcId(2)], torch.tensor([6]).numpy().tobytes(), ORIGIN)
        await trio.testing.wait_all_tasks_blocked()
        net.died(1)
        await net.target.moves.receive(MOVE, ProcId(1), there)
        assert there.tolist() == [6]


async def test_tensor_must_be_offered_once_and_whole() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        peer: Any = net.peers[ProcId(1)]
        offer = messages.Offer(3, 9, 5)
        with pytest.raises(ProtocolError, match="offered once, with one body at most, got move 5"):
            net.target.moves.offered(peer, offer, [memoryview(b"a"), memoryview(b"b")])
        net.target.moves.offered(peer, offer, [memoryview(b"1234567")])
        with pytest.raises(ProtocolError, match="offered once"):
            net.target.moves.offered(peer, offer, [])
        with pytest.raises(ProtocolError, match="a tensor of 8 bytes must be offered whole, got 7 bytes"):
            await net.target.moves.receive(MOVE, ProcId(1), empty(1))
        net.target.moves.offered(peer, offer, [])
        with pytest.raises(ProtocolError, match="got 0 bytes"):
            await net.target.moves.receive(MOVE, ProcId(1), empty(1))
        net.source.moves.send(MOVE, 3, [ProcId(2)], await staged(net.source, torch.arange(4)), ORIGIN)
        with pytest.raises(ProtocolError, match="a tensor of 40 bytes must be lent whole, got 32 bytes"):
            await net.target.moves.receive(MOVE, ProcId(1), empty(5))
        assert net.source.moves.lent_bytes == 0


@pytest.mark.parametrize("is_alive", [True, False])
async def test_bytes_are_sent_where_memory_cannot_be_read(is_alive: bool) -> None:
    async with trio.open_nursery() as nursery:
        net, there = Net(nursery), empty()
        net.target.error = LinkLost("no carrier")
        net.source.moves.send(MOVE, 3, [ProcId(2)], await staged(net.source, torch.arange(4)), ORIGIN)
        await trio.testing.wait_all_tasks_blocked()
        if is_alive:
            await net.target.moves.receive(MOVE, ProcId(1), there)
            assert there.tolist() == [0, 1, 2, 3]
            assert [message for _, message, _ in net.target.sent] == [messages.Taken(3, 9, 5, is_unread=True)]
            assert net.source.moves.lent_bytes == 0
        else:
            net.died(1)
            with pytest.raises(LinkLost):
                await net.target.moves.receive(MOVE, ProcId(1), there)
            assert net.target.sent == []


# ---- from and to the controller --------------------------------------------------------------------------------------


def a_rank(net: Net, replies: list[Any]) -> Rank:
    """Return a rank in process 2; what is run in Trio comes from a thread of the test."""

    def reply_lent(request: int, described: list[Any], memory: memoryview, *, is_staged: bool) -> None:
        replies.append((request, described, memory, is_staged))

    outside: Any = SimpleNamespace(
        proc=net.target, controller=net.peers[ProcId(9)], engine=3, run_in_trio=trio.from_thread.run,
        tell=lambda function, *args: function(*args), reply=lambda *args: replies.append(args), reply_lent=reply_lent,
    )  # fmt: skip
    return Rank("procs", Extent(gpus=2), 1, CPU, outside)


async def test_rank_reads_its_part_of_what_the_controller_lends() -> None:
    whole = torch.arange(12).reshape(3, 4)
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        rank = a_rank(net, [])
        for box in (Box((0, 0), (3, 4)), Box((1, 0), (2, 4)), Box((0, 1), (3, 2)), Box((3, 0), (0, 4))):
            expected = whole[Box.of_all((3, 4)).slices(box)]
            data = memoryview(bytearray(whole.numpy().tobytes()))
            for move in (0, 5):
                if move:
                    handle = net.controller.moves.lend(
                        MOVE, await staged(net.controller, whole), [net.peers[ProcId(2)]]
                    )  # type: ignore[list-item]
                    data = memoryview(msgspec.msgpack.encode(handle.fields()))
                found = await trio.to_thread.run_sync(arrived, rank, data, move, torch.int64, (3, 4), box)
                assert torch.equal(found, expected), (box, move)
                assert found.is_contiguous()
                assert net.controller.moves.lent_bytes == 0
        assert net.target.reads == [(0, 96), (32, 64), (8, 80)]


async def test_what_the_controller_lends_in_vain_is_released() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        rank = a_rank(net, [])
        net.controller.moves.lend(MOVE, await net.controller.moves.stage(8), [net.peers[ProcId(2)]])  # type: ignore[list-item]
        unneeded(rank, 0)
        assert net.controller.moves.lent_bytes == 8
        unneeded(rank, 5)
        assert net.controller.moves.lent_bytes == 0


async def test_parts_are_delivered_in_memory_that_the_controller_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_MOVE_BYTES", 200)
    one, other = torch.arange(6, dtype=torch.int16).reshape(2, 3), torch.arange(4.0)
    found = [(4, Box((1, 0), (2, 3)), one.t().contiguous().t()), (2, Box((0,), (4,)), other)]
    replies: list[Any] = []
    async with trio.open_nursery() as nursery:
        net = Net(nursery)
        rank = a_rank(net, replies)
        await trio.to_thread.run_sync(deliver, rank, 11, found)
        net.target.moves.lend(MOVE, replies[0][2], [net.peers[ProcId(9)]])  # type: ignore[list-item]
        await trio.to_thread.run_sync(deliver, rank, 12, [*found, *found])
        await trio.to_thread.run_sync(deliver, rank, 13, [])
        for request, described, memory, is_staged in replies[:2]:
            assert is_staged == (request == 11)
            for (index, box, value), (number, *fields) in zip([*found, *found], described, strict=False):
                part = part_of(fields, memory.nbytes)
                assert (number, part.box, part.dtype, part.offset % 64) == (index, box, value.dtype, 0)
                flat = torch.frombuffer(memory, dtype=part.dtype, count=box.count, offset=part.offset)
                assert torch.equal(flat.view(value.size()), value)
            assert len(described) == (2 if is_staged else 4)
        assert replies[2][:2] == (13, [])
        assert (replies[2][2].nbytes, replies[2][3]) == (0, False)
        net.target.moves.take_back(MOVE)
        net.target.error = RuntimeError("out of memory")
        await trio.to_thread.run_sync(deliver, rank, 14, found, (7, 8))
        [(request, poison)] = replies[3:]
        assert (request, poison.team, poison.number, poison.what) == (14, 7, 8, "trimesh::fetch")
        assert poison.error is net.target.error


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_parts_lie_one_after_the_other_at_cache_lines() -> None:
    boxes = [(Box((0,), (3,)), torch.int64), (Box((0,), (8,)), torch.int64), (Box((0,), (0,)), torch.int8)]
    parts, nbytes = lay_out([*boxes, (Box((2, 1), (1, 5)), torch.int8)])
    assert [part.offset for part in parts] == [0, 64, 128, 128]
    assert [part.nbytes for part in parts] == [24, 64, 0, 5]
    assert nbytes == 192
    assert parts[3].fields() == ([2, 1], [1, 5], "int8", 128)
    assert lay_out([]) == ([], 0)
    fill(memoryview(b""), parts[2], torch.zeros(0))
    assert part_of(parts[3].fields(), 133) == Part(Box((2, 1), (1, 5)), torch.int8, 128)


@rows(
    "fields, text",
    [
        ([[0], [3], "int8", 2], "within the 4 bytes"),
        ([[0], [3], "int8"], "by its box, type and place"),
        ([0, [3], "int8", 0], "by its box, type and place"),
        ([[0], [3], "nothing", 0], "by its box, type and place"),
        ([[0], [3], "ones", 0], "by whole numbers and a type"),
        ([[0], [-1], "int8", 0], "by whole numbers and a type"),
        ([[0], [1.0], "int8", 0], "by whole numbers and a type"),
        ([[True], [1], "int8", 0], "by whole numbers and a type"),
        ([[0], [1], "int8", -1], "by whole numbers and a type"),
        ([[0, 0], [1], "int8", 0], "within the 4 bytes"),
        (None, "by its box, type and place"),
    ],
)
def test_fields_that_are_no_part_break_the_protocol(fields: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        part_of(fields, 4)
    assert part_of([[0], [3], "int8", 1], 4).offset == 1
