"""The end of a channel: whatever had a port and has it no more (T2)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, attempt, only_real, only_sim, tick
from tests.conformance.sender import Sender, rest

from trimesh import MeshErrorGroup, limits, open_channel


@pytest.mark.daily("real")
async def test_port_that_is_dropped_releases(backend: Backend):
    """T2: what is collected need not be closed."""
    async with backend.procs() as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        await senders.keep.call(port)
        await port.aclose()
        await senders.send.call(1)
        await senders.drop.call()
        assert await rest(receiver) == [1, 1]


async def test_port_that_only_a_traceback_holds_releases(backend: Backend):
    """An endpoint that fails is over, with all that it had."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(str, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        with pytest.raises(ValueError, match="with a port in a frame"):
            await sender.fail.call_one(port)
        await port.aclose()
        assert await rest(receiver) == ["failing"]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let the last reference alone end an object."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def cancel_call(sender: Any, port: Any) -> None:
    async with trio.open_nursery() as nursery:
        holding = attempt(nursery, sender.hold.call, port)
        await sender.count_sent.call()
        holding.cancel()


async def cancel_send(sender: Any, port: Any) -> None:
    await sender.keep.call(port)
    async with trio.open_nursery() as nursery:
        pouring = attempt(nursery, sender.pour.call)
        await sender.wait_sent.call(4)
        pouring.cancel()
    await sender.drop.call()


async def expire_call(sender: Any, port: Any) -> None:
    with trio.move_on_after(1):
        await sender.hold.call(port)


async def fail(sender: Any, port: Any) -> None:
    with pytest.raises(ValueError, match="in a frame"):
        await sender.fail.call_one(port)


async def fail_elsewhere(sender: Any, port: Any) -> None:
    await sender.relay.call_settled(sender, port)


async def leave_stream(sender: Any, port: Any) -> None:
    async with sender.lend.stream(port, 100) as results:
        async for _ in results:
            break


@only_sim
@pytest.mark.parametrize("use", [cancel_call, cancel_send, expire_call, fail, fail_elsewhere, leave_stream])
async def test_endpoint_that_is_over_holds_nothing(backend: Backend, without_collector: None, use: Any):
    """T2: however it ended; no port waits for the collector of garbage."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await use(sender, port)
        await port.aclose()
        assert all(item in ("failing", None) for item in await rest(receiver))


@only_real
async def test_port_that_is_collected_in_another_thread_releases(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=4) as (port, receiver):
        ports = [port.clone()]
        await port.aclose()
        await trio.to_thread.run_sync(ports.clear)
        assert await rest(receiver) == []


async def test_message_that_is_cancelled_in_the_mailbox_releases(backend: Backend):
    """T2: the port was never decoded over there."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            blocking = attempt(nursery, sender.block.call)
            await sender.wait_blocked.call()
            queued = attempt(nursery, sender.keep.call, port)
            await sender.count_sent.call()
            await port.aclose()
            queued.cancel()
            assert await rest(receiver) == []
            blocking.cancel()


async def test_message_that_is_refused_releases(backend: Backend):
    async with open_channel(int, capacity=4) as (port, receiver), backend.procs({"gpus": 2}) as procs:
        other = await procs.slice(gpus=1).spawn("other", Sender)
        async with procs.slice(gpus=0).spawn("sender", Sender) as sender:
            await other.keep.call(sender)
        with pytest.raises(MeshErrorGroup):
            await other.pass_on.call(sender, port)  # refused here: the owner knows
        reference = await other.give.call_one()
        with pytest.raises(MeshErrorGroup):
            await reference.keep.call(port)
        await port.aclose()
        assert await rest(receiver) == []


async def test_message_that_waits_for_room_and_is_withdrawn_releases(backend: Backend):
    """T2: it was never sent."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            blocking = attempt(nursery, sender.block.call)
            await sender.wait_blocked.call()
            calls = [attempt(nursery, sender.keep.call, port) for _ in range(limits.MAILBOX_MESSAGES + 5)]
            await tick(3)
            await port.aclose()
            for call in calls:
                call.cancel()
            del calls
            assert await rest(receiver) == []
            blocking.cancel()


@only_sim
async def test_message_that_has_expired_releases(backend: Backend):
    """T2, D04: its time was over before it was begun."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            blocking = attempt(nursery, sender.block.call)
            await sender.wait_blocked.call()
            with trio.move_on_after(1):
                await sender.keep.call(port)
            await port.aclose()
            assert await rest(receiver) == []
            blocking.cancel()


async def test_result_that_nobody_waits_for_releases(backend: Backend):
    """C12: a late reply is dropped, with the ports in it."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await sender.keep.call(port)
        await port.aclose()
        await sender.give.broadcast()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.give.call)
                await tick(2)
                scope.cancel()
        await sender.drop.call()
        assert await rest(receiver) == []
