"""What channels refuse, and when they are checkpoints (T2, K01, K02, K03)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, attempt, tick
from tests.conformance.sender import Sender, received, rest

import trimesh
from trimesh import PayloadError, open_channel

# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [float("inf"), -1])
def test_capacity_must_be_a_finite_number(capacity: Any):
    with pytest.raises(ValueError, match="capacity"):
        open_channel(int, capacity=capacity)


@pytest.mark.parametrize("capacity", ["64", 1.5, True, None])
def test_capacity_must_be_a_number(capacity: Any):
    with pytest.raises(TypeError, match="capacity"):
        open_channel(int, capacity=capacity)


async def test_receiver_stays_at_home(backend: Backend):
    """T2: a port travels, a receiver does not."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=1) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        with pytest.raises(TypeError, match="stays in the process that opened its channel"):
            await sender.keep.call(receiver)
        with pytest.raises(TypeError, match="only be sent in a message"):
            pickle.dumps(port)
        await sender.keep.call(port)


async def test_item_that_cannot_be_serialised_is_refused(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(capacity=1) as (port, receiver):
        for send in (port.send_nowait, port.send):
            with pytest.raises(TypeError, match="an item of a channel"):
                found = send(i for i in range(3))
                if found is not None:
                    await found
        await port.send(1)
        assert await receiver.receive() == 1


class Unbuildable:
    """Can be sent, not rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.by_value  # what does not fit is refused by its sender without pickle
async def test_item_that_cannot_be_rebuilt_does_not_end_the_channel(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(capacity=3) as (port, receiver):
        await port.send(Unbuildable())
        await port.send(1)
        with pytest.raises(PayloadError, match="an item of a channel"):
            await receiver.receive()
        assert await receiver.receive() == 1


async def test_closed_port_neither_sends_nor_travels(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=1) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        await sender.keep.call(port)
        await port.aclose()
        await port.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await port.send(1)
        with pytest.raises(trio.ClosedResourceError):
            port.send_nowait(1)
        with pytest.raises(TypeError, match="open"):
            await sender.keep.call(port)
        await sender.send.call(2)
        assert await receiver.receive() == 2


@pytest.mark.parametrize("capacity", [0, 1])
async def test_closing_a_port_ends_its_own_senders(backend: Backend, capacity: int):
    """Those of another port of the same process go on."""
    async with backend.procs({"gpus": 1}), open_channel(str, capacity=capacity) as (port, receiver):
        other = port.clone()
        if capacity:
            await other.send("first")
        async with trio.open_nursery() as nursery:
            blocked = attempt(nursery, port.send, "lost")
            await tick(3)
            going_on = attempt(nursery, other.send, "last")
            await tick(3)
            await port.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await blocked.result()
            assert await received(receiver, 1 + capacity) == ["first"] * capacity + ["last"]
            await going_on.result()
        await other.aclose()


async def test_closed_receiver_receives_nothing(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=1) as (port, receiver):
        async with trio.open_nursery() as nursery:
            waiting = attempt(nursery, receiver.receive)
            await tick(3)
            await receiver.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await waiting.result()
        with pytest.raises(trio.ClosedResourceError):
            await receiver.receive()
        with pytest.raises(trio.ClosedResourceError):
            receiver.receive_nowait()
        with pytest.raises(trio.BrokenResourceError):
            await port.send(1)
        await receiver.aclose()


@pytest.mark.parametrize("capacity", [0, 1])
async def test_senders_learn_that_the_receiver_is_closed(backend: Backend, capacity: int):
    """T2: those that wait, and those that come later; leaving the block closes it."""
    async with backend.procs() as procs:
        senders = await procs.spawn("senders", Sender)
        async with trio.open_nursery() as nursery:
            async with open_channel(int, capacity=capacity) as (port, receiver):
                await senders.keep.call(port)
                pouring = attempt(nursery, senders.pour.call_settled, 1)
                await receiver.receive()
            for outcome in (await pouring.result()).values():
                assert isinstance(outcome.error, trio.BrokenResourceError)
                assert "receiver of this channel is closed" in str(outcome.error)
            for outcome in (await senders.send.call_settled(1)).values():
                assert isinstance(outcome.error, trio.BrokenResourceError)


async def test_port_that_arrives_after_the_end_leads_nowhere(backend: Backend):
    """T2: the receiver was closed while the message with the port waited."""
    async with backend.procs({"gpus": 1}) as procs:
        sender = await procs.spawn("sender", Sender)
        async with trio.open_nursery() as nursery:
            blocking = attempt(nursery, sender.block.call)
            await sender.wait_blocked.call()
            async with open_channel(int, capacity=1) as (port, _receiver):
                late = attempt(nursery, sender.send_item.call_settled, port, 1)
                await tick(2)  # it has sent: tasks that can run do so in any order
                await sender.count_sent.call()
            blocking.cancel()
            [outcome] = (await late.result()).values()
            assert isinstance(outcome.error, trio.BrokenResourceError)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


async def test_every_async_function_is_a_checkpoint(backend: Backend):
    """K01, and K03: a cancelled scope is seen by each."""
    async with backend.procs({"gpus": 1}) as procs:
        await procs.spawn("sender", Sender)
        channel = open_channel(int, capacity=4)
        with trio.testing.assert_checkpoints():
            port, receiver = await channel.__aenter__()
        with trio.testing.assert_checkpoints():
            await port.send(1)
        for _ in range(2):
            await port.send(1)
        await tick(3)
        with trio.testing.assert_checkpoints():
            await receiver.receive()
        for wait in (receiver.receive, lambda: port.send(2)):
            with trio.CancelScope() as scope:
                scope.cancel()
                await wait()
                raise AssertionError
            assert scope.cancelled_caught
        clone = port.clone()
        with trio.testing.assert_checkpoints():
            await clone.aclose()
        await port.aclose()
        assert await rest(receiver) == [1, 1]
        with trio.testing.assert_checkpoints(), pytest.raises(trio.EndOfChannel):
            await receiver.receive()
        with trio.testing.assert_checkpoints():
            await receiver.aclose()
        with trio.testing.assert_checkpoints():
            await channel.__aexit__(None, None, None)


def test_all_async_functions_are_listed():
    """K01: a new one has to be added to the test above."""
    import inspect

    names = {
        (cls.__name__, name)
        for cls in (trimesh.Port, trimesh.Receiver)
        for name, value in vars(cls).items()
        if inspect.iscoroutinefunction(value) and not name.startswith("_")
    }
    assert names == {("Port", "send"), ("Port", "aclose"), ("Receiver", "receive"), ("Receiver", "aclose")}
