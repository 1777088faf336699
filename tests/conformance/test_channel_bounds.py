"""What waits in a channel is bounded, and waiting can be cancelled (S03, T2)."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, only_sim, tick
from tests.conformance.sender import Sender, received, rest

import trimesh
from trimesh import Port, limits, open_channel

# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 5, 64])
async def test_slow_receiver_stops_every_sender(backend: Backend, capacity: int):
    """S03: `capacity` items of each process wait, no more; room is used as soon as there is some."""
    async with backend.procs() as procs, open_channel(int, capacity=capacity) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        await senders.keep.call(port)
        await port.aclose()
        async with trio.open_nursery() as nursery:
            pouring = attempt(nursery, senders.pour.call, 1)
            assert list((await senders.wait_sent.call(capacity)).values()) == [capacity] * 2
            for _ in range(3):
                await senders.count_sent.call()
            assert list((await senders.count_sent.call()).values()) == [capacity] * 2
            await received(receiver, 2 * capacity)
            await senders.wait_sent.call(2 * capacity)
            for _ in range(3):
                assert list((await senders.count_sent.call()).values()) == [2 * capacity] * 2
            pouring.cancel()


async def test_size_of_what_waits_is_bounded(backend: Backend):
    """S03: whatever the capacity, `limits.MAILBOX_BYTES` of one process wait; one larger item waits alone."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(bytes, capacity=1000) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await sender.keep.call(port)
        size = limits.MAILBOX_BYTES // 4
        async with trio.open_nursery() as nursery:
            pouring = attempt(nursery, sender.pour.call, bytes(size))
            await sender.wait_sent.call(3)
            for _ in range(3):
                assert await sender.count_sent.call_one() <= 4
            await received(receiver, 8)
            pouring.cancel()
    async with backend.procs({"gpus": 1}) as procs, open_channel(bytes, capacity=1000) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_item.call, port, bytes(limits.MAILBOX_BYTES + 1))
            assert len(await receiver.receive()) == limits.MAILBOX_BYTES + 1


async def test_send_without_capacity_returns_when_the_item_is_taken(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=0) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await sender.keep.call(port)
        async with trio.open_nursery() as nursery:
            pouring = attempt(nursery, sender.pour.call, 1)
            for count in range(5):
                assert await sender.count_sent.call_one() == count
                assert await receiver.receive() == 1
                await sender.wait_sent.call(count + 1)
            pouring.cancel()
        with pytest.raises(trio.WouldBlock):
            port.send_nowait(1)


@only_sim
@pytest.mark.parametrize("is_closed", [True, False])
async def test_large_item_that_is_withdrawn_lets_smaller_ones_pass(backend: Backend, is_closed: bool):
    """S03: items are sent in their order, and a cancelled one, or one whose port is closed, holds none back."""
    async with backend.procs({"gpus": 1}), open_channel(bytes, capacity=9) as (port, receiver):
        other = port.clone()
        await port.send(bytes(limits.MAILBOX_REPORT_BYTES + 1))
        async with trio.open_nursery() as nursery:
            large = attempt(nursery, other.send, bytes(limits.MAILBOX_BYTES))
            await tick(3)
            small = attempt(nursery, port.send, b"small")
            await tick(3)
            assert not small.over.is_set()
            if is_closed:
                await other.aclose()
                with pytest.raises(trio.ClosedResourceError):
                    await large.result()
            else:
                large.cancel()
            await small.result()
        await port.aclose()
        await other.aclose()
        assert [len(item) for item in await rest(receiver)] == [limits.MAILBOX_REPORT_BYTES + 1, len(b"small")]


@only_sim
async def test_item_that_was_not_taken_is_withdrawn_with_its_port(backend: Backend):
    """T2: also one that has arrived, with capacity 0; the next sender's is offered then."""
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=0) as (port, receiver):
        other = port.clone()
        async with trio.open_nursery() as nursery:
            first = attempt(nursery, other.send, 1)
            await tick(3)
            second = attempt(nursery, port.send, 2)
            await tick(3)
            await other.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await first.result()
            assert await receiver.receive() == 2
            await second.result()


@only_sim
async def test_senders_of_items_that_nothing_took_see_the_receiver_close(backend: Backend):
    """T2: the one whose item has arrived, with capacity 0, and those behind it; none returns as if it were taken."""
    channel = open_channel(int, capacity=0)
    async with backend.procs({"gpus": 1}), channel as (port, receiver), trio.open_nursery() as nursery:
        sending = [attempt(nursery, port.send, number) for number in range(2)]
        await tick(3)
        await receiver.aclose()
        for one in sending:
            with pytest.raises(trio.BrokenResourceError):
                await one.result()


async def test_send_nowait_raises_when_there_is_no_room(backend: Backend):
    """K02."""
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=2) as (port, receiver):
        with trio.testing.assert_no_checkpoints():
            port.send_nowait(1)
            port.send_nowait(2)
            with pytest.raises(trio.WouldBlock):
                port.send_nowait(3)
            with pytest.raises(trio.WouldBlock):
                receiver.receive_nowait()
        found = None
        while found is None:
            await trio.lowlevel.checkpoint()
            with contextlib.suppress(trio.WouldBlock):
                found = receiver.receive_nowait()
        await port.aclose()
        assert (found, await rest(receiver)) == (1, [2])


async def test_dump_names_senders_that_wait(backend: Backend):
    """M4: those of ports, like calls."""
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=1) as (port, receiver):
        async with trio.open_nursery() as nursery:
            port.send_nowait(1)
            nursery.start_soon(port.send, 2)
            await tick(2)
            before, after = io.StringIO(), io.StringIO()
            trimesh.dump(before)
            assert [await receiver.receive(), await receiver.receive()] == [1, 2]
        trimesh.dump(after)
    assert re.search(r"^  send to channel \d+: waits, \d+\.\d s old$", before.getvalue(), re.MULTILINE)
    assert "send to channel" not in after.getvalue()


async def test_send_nowait_makes_the_link_that_it_misses(backend: Backend):
    """K02: the home is another worker, which this one may know nothing of yet."""
    async with backend.procs() as procs, trio.open_nursery() as nursery:
        senders = await procs.spawn("senders", Sender)
        home, other = senders.slice(gpus=0), senders.slice(gpus=1)
        result = attempt(nursery, home.serve_to.call_one, other, 2)
        await other.wait_kept.call()
        for item in range(5):
            await other.send_nowait.call(item)
        await other.close.call()
        assert await result.result() == list(range(5))


# ---- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 3])
async def test_send_that_is_cancelled_has_sent_nothing(backend: Backend, capacity: int):
    """S03: it gives way to those behind it."""
    async with backend.procs({"gpus": 1}), open_channel(str, capacity=capacity) as (port, receiver):
        for _ in range(capacity):
            await port.send("kept")
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                blocked = attempt(nursery, port.send, "cancelled")
                behind = attempt(nursery, port.send, "cancelled")
                await tick(5)
                blocked.cancel()
                behind.cancel()
                await blocked.over.wait()
                await behind.over.wait()
                assert blocked.cancelled
                assert behind.cancelled
            last = attempt(nursery, port.send, "last")
            assert await received(receiver, capacity + 1) == ["kept"] * capacity + ["last"]
            await last.over.wait()
        await port.aclose()
        assert await rest(receiver) == []


async def test_send_without_capacity_is_either_taken_or_cancelled(backend: Backend):
    """A cancel that comes while the item is being taken: never both, never neither."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(Port, capacity=0) as (give_to, ports):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            result = attempt(nursery, sender.serve_channel.call_one, give_to, 0)
            port = await ports.receive()
            arrived: list[int] = []
            for index in range(50):
                one = attempt(nursery, port.send, index)
                await tick(index % 10)
                one.cancel()
                await one.over.wait()
                if not one.cancelled:
                    arrived.append(index)
            await port.aclose()
            assert await result.result() == arrived


async def test_receive_that_is_cancelled_has_taken_nothing(backend: Backend):
    async with (
        backend.procs({"gpus": 1}),
        open_channel(int, capacity=4) as (port, receiver),
        trio.open_nursery() as nursery,
    ):
        for _ in range(10):
            waiting = attempt(nursery, receiver.receive)
            await tick(3)
            waiting.cancel()
            await waiting.over.wait()
        await port.send(1)
        assert await receiver.receive() == 1


async def test_cancel_of_a_sender_leaves_its_port(backend: Backend):
    """C03: other sends of the process, and later ones, are not touched."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=2) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await sender.keep.call(port)
        await port.aclose()
        async with trio.open_nursery() as nursery:
            pouring = attempt(nursery, sender.pour.call, 1)
            await sender.wait_sent.call(2)
            pouring.cancel()
            await pouring.over.wait()
            later = attempt(nursery, sender.send.call, 2)
            assert await received(receiver, 3) == [1, 1, 2]
            await later.over.wait()
        await sender.close.call()
        assert await rest(receiver) == []


@only_sim
async def test_recall_that_is_not_answered_is_given_up(backend: SimBackend):
    """C2: the process of the receiver is out of reach for long; the port goes on when it is back."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(Port, capacity=0) as (give_to, ports):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            result = attempt(nursery, sender.serve_channel.call_one, give_to, 0)
            port = await ports.receive()
            await port.send("first")
            backend.lag.data = 100.0
            given_up = attempt(nursery, port.send, "recalled too late")
            await tick(5)
            before = trio.current_time()
            given_up.cancel()
            await given_up.over.wait()
            assert given_up.cancelled
            assert trio.current_time() - before == limits.CANCEL_ACK_SECONDS
            backend.lag.data = 0.0
            await port.send("last")
            await port.aclose()
            assert await result.result() in (["first", "recalled too late", "last"], ["first", "last"])
