"""One stream, frame by frame, from the side of its consumer and of its producer (C12, S03-S06; rule T1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing
from tests.runtime.frames import RecordingLink, RecordingTransport
from tests.runtime.test_outgoing import MESH, REQUEST, Stage

from trimesh import Actor, endpoint, limits
from trimesh._routing.collector import LocalFailure
from trimesh._runtime.actors.cell import ActorSpec, Cell
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Parcel, Peer, Target
from trimesh._transport.interface import Lane
from trimesh._wire import messages
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent


def open_stream(stage: Stage, *, window: int = 4, fail_fast: bool = True) -> OutgoingStream:
    targets = [Target(peer, MESH) for peer in stage.peers]
    call_id = stage.proc.new_call_id()
    stream = OutgoingStream(stage.proc, call_id, REQUEST, targets, fail_fast=fail_fast, window=window)
    head = messages.encode(messages.Call(call_id, MESH, "endpoint", None, b"x", window))
    stream.start(Parcel(head, (), (), 10))
    return stream


def item(stage: Stage, rank: int, stream: OutgoingStream, payload: bytes = b"item") -> None:
    stage.say(rank, messages.Item(stream.call_id, payload))


def taken(stage: Stage, rank: int) -> list[int]:
    return [message.count for message in stage.links[rank].sent if isinstance(message, messages.Taken)]


async def test_items_come_before_the_end():
    """OS-1: also those that wait when the last terminal frame has come."""
    stage = Stage.of(2)
    stream = open_stream(stage)
    item(stage, 0, stream, b"a")
    item(stage, 1, stream, b"b")
    stage.returned(0, stream)
    stage.returned(1, stream)
    found = [await stream.next() for _ in range(3)]
    assert [(one.index, one.payload) for one in found[:2] if one is not None] == [(0, b"a"), (1, b"b")]
    assert found[2] is None
    await stream.close("over")
    assert stage.cancels(0) == []
    stage.check_clean()


async def test_result_of_a_plain_endpoint_is_its_item():
    """S06."""
    stage = Stage.of(1)
    stream = open_stream(stage, window=0)
    stage.returned(0, stream)
    found = await stream.next()
    assert found is not None
    assert found.payload == b"value"
    assert taken(stage, 0) == []
    assert await stream.next() is None
    await stream.close("over")
    stage.check_clean()


async def test_taken_items_are_reported_on_the_control_lane():
    """S03, S07."""
    stage = Stage.of(1)
    stream = open_stream(stage, window=8)
    for _ in range(5):
        item(stage, 0, stream)
    for _ in range(5):
        await stream.next()
    assert taken(stage, 0) == [2, 4]
    link = stage.links[0]
    lanes = {lane for message, lane in zip(link.sent, link.lanes, strict=True) if isinstance(message, messages.Taken)}
    assert lanes == {Lane.CONTROL}


async def test_failure_cancels_the_others_at_once():
    """OS-2: no task waits in `next`."""
    stage = Stage.of(3)
    stream = open_stream(stage)
    item(stage, 2, stream)
    stage.say(1, messages.Error(stream.call_id, MESH, 1, b"error"))
    assert [len(stage.cancels(rank)) for rank in range(3)] == [1, 0, 1]
    assert await stream.next() is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.next)
        await trio.testing.wait_all_tasks_blocked()
        stage.acknowledged(0, stream)
        item(stage, 2, stream)  # under way when it was cancelled
    stage.acknowledged(2, stream)
    assert await stream.next() is None
    assert stream.collector.failures == (1,)


async def test_collect_cancels_nobody():
    """S06."""
    stage = Stage.of(2)
    stream = open_stream(stage, fail_fast=False)
    stage.say(1, messages.Error(stream.call_id, MESH, 1, b"error"))
    item(stage, 0, stream)
    assert stage.cancels(0) == []
    assert await stream.next() is not None


async def test_death_comes_after_the_items():
    """E14: what the process sent before it died has been read."""
    stage = Stage.of(1)
    stream = open_stream(stage)
    item(stage, 0, stream)
    stage.proc.declare_gone(stage.peers[0], ProcDeath("gone"))
    assert await stream.next() is not None
    assert await stream.next() is None
    assert isinstance(stream.collector.outcomes[0], LocalFailure)


async def test_silent_rank_ends_the_stream_after_the_bound(autojump_clock: trio.testing.MockClock):
    """C2: counted from the cancel, whoever waits."""
    stage = Stage.of(2)
    stream = open_stream(stage)
    start = trio.current_time()
    stage.say(1, messages.Error(stream.call_id, MESH, 1, b"error"))
    await trio.sleep(1)
    assert await stream.next() is None
    assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
    await stream.close("over")
    assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
    dropped = stage.proc.dropped_replies
    item(stage, 0, stream)
    stage.acknowledged(0, stream)
    assert stage.proc.dropped_replies == dropped + 2  # C12
    stage.check_clean()


async def test_stalled_rank_ends_the_stream_soon(autojump_clock: trio.testing.MockClock):
    """C2: when that becomes known, whoever waits."""
    stage = Stage.of(2)
    stream = open_stream(stage)
    stage.peers[1].stalled(5.0)
    stage.peers[1].stalled(0.0)
    stage.say(1, messages.Error(stream.call_id, MESH, 1, b"error"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.next)
        await trio.sleep(3)
        stage.peers[0].stalled(5.0)
    assert trio.current_time() == 3
    assert await stream.next() is None
    await stream.close("over")
    assert trio.current_time() == 3


async def test_wait_for_items_is_one_for_any_rank():
    """C8: until an item has come, the stream is left, or it is cancelled."""
    stage = Stage.of(2)
    stream = open_stream(stage)
    assert stream.any_wait is stream
    assert stream.waiting_task is None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.next)
        await trio.testing.wait_all_tasks_blocked()
        assert {stream.waiting_task} == set(nursery.child_tasks)
        assert stream in stage.proc.deadlocks._any
        item(stage, 0, stream)
        assert stream.waiting_task is None
    item(stage, 0, stream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.close, "enough")
        await trio.testing.wait_all_tasks_blocked()
        assert stream.waiting_task is None
        stage.acknowledged(0, stream)
        stage.acknowledged(1, stream)
    stage.check_clean()


async def test_close_wakes_who_waits_and_takes_no_more():
    """S04, OS-3."""
    stage = Stage.of(1)
    stream = open_stream(stage)

    async def wait_in_vain() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await stream.next()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_in_vain)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(stream.close, "enough")
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        item(stage, 0, stream)
        assert [cancel.reason for cancel in stage.cancels(0)] == ["enough"]
        stage.acknowledged(0, stream)
    await wait_in_vain()
    stage.check_clean()


@pytest.mark.parametrize(
    "break_rules",
    [
        pytest.param(lambda stage, stream: [item(stage, 0, stream) for _ in range(5)], id="beyond the window"),
        pytest.param(lambda stage, stream: (stage.returned(0, stream), item(stage, 0, stream)), id="after its end"),
        pytest.param(lambda stage, stream: item(stage, 0, stage.call()), id="of a call"),
        pytest.param(lambda stage, stream: item(stage, 0, open_stream(stage, window=0)), id="of a plain endpoint"),
        pytest.param(lambda stage, stream: stage.say(0, messages.Call(9, MESH, "x", None, b"", -1)), id="window"),
    ],
)
async def test_foreign_items_break_the_link(break_rules: Any):
    """E12: nothing else comes of them."""
    stage = Stage.of(2)
    stream = open_stream(stage)
    break_rules(stage, stream)
    assert stage.links[0].aborted


def test_window_of_a_peer_is_bounded():
    """E12."""
    for window in (-1, limits.STREAM_WINDOW_MAX + 1):
        with pytest.raises(ProtocolError):
            messages.decode(messages.encode(messages.Call(1, 1, "endpoint", None, b"", window)))


# ---- the producer's side ---------------------------------------------------------------------------------------------


class Counting(Actor):
    """Counts what its generator has yielded."""

    produced: int = 0

    @endpoint
    async def numbers(self) -> AsyncIterator[int]:
        while True:
            Counting.produced += 1
            yield self.produced

    @endpoint
    async def plain(self) -> int:
        return 1


Started = tuple[Proc, Peer, RecordingLink]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    """A process with one actor, a peer of it, and the link to that."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1)
    link = RecordingLink()
    peer = proc.adopt_link(ProcId(77), link)
    cell = Cell(proc, ActorSpec(MESH, "mesh", Counting, Counting, Extent(n=1).point(0)), peer)
    proc.cells[MESH] = cell
    async with trio.open_nursery() as nursery:
        await nursery.start(cell.run)
        yield proc, peer, link
        await cell.stop(1.0)


async def test_producer_waits_for_its_window(started: Started):
    """T1, S03: and goes on by as many items as were taken; a total that comes again does no harm."""
    proc, peer, link = started
    Counting.produced = 0
    receive(proc, link, messages.Call(1, MESH, "numbers", None, arguments(proc), 3))
    await trio.testing.wait_all_tasks_blocked()
    assert Counting.produced == 3
    for total in (2, 2, 1):
        receive(proc, link, messages.Taken(1, total))
        await trio.testing.wait_all_tasks_blocked()
        assert Counting.produced == 5
    assert sum(isinstance(message, messages.Item) for message in link.sent) == 5
    receive(proc, link, messages.Cancel(1, 1, "enough"))
    await trio.testing.wait_all_tasks_blocked()
    assert [type(message) for message in link.terminals()] == [messages.CancelAck]
    receive(proc, link, messages.Taken(1, 5))  # too late, no harm
    assert not link.aborted
    assert peer.inbound == {}


@pytest.mark.parametrize("total", [4, 2**60])
async def test_taking_more_than_was_sent_breaks_the_link(started: Started, total: int):
    """E12."""
    proc, _, link = started
    receive(proc, link, messages.Call(1, MESH, "numbers", None, arguments(proc), 3))
    await trio.testing.wait_all_tasks_blocked()
    receive(proc, link, messages.Taken(1, total))
    assert link.aborted


async def test_taking_from_a_call_breaks_the_link(started: Started):
    """E12."""
    proc, _, link = started
    receive(proc, link, messages.Call(1, MESH, "plain", None, arguments(proc)))
    receive(proc, link, messages.Taken(1, 1))
    assert link.aborted


@pytest.mark.parametrize(("name", "window"), [("numbers", 0), ("plain", 3)])
async def test_wrong_kind_of_endpoint_is_refused(started: Started, name: str, window: int):
    """E12: the two sides have different classes of one name."""
    proc, _, link = started
    receive(proc, link, messages.Call(1, MESH, name, None, arguments(proc), window))
    await trio.testing.wait_all_tasks_blocked()
    [refused] = link.terminals()
    assert isinstance(refused, messages.Refused)
    assert refused.kind == "unknown"
    assert not link.aborted


def receive(proc: Proc, link: RecordingLink, message: messages.Message) -> None:
    proc.received(link, memoryview(messages.encode(message)), [])


def arguments(proc: Proc) -> bytes:
    return proc.values.encode(((), {}), what="test").payload
