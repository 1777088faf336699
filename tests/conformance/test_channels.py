"""Channels whose ports travel: in which order, and where to (T2, S10)."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, attempt
from tests.conformance.sender import PortError, Sender, received, rest

import trimesh
from trimesh import open_channel, this_proc

# ---- order and end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, 64])
async def test_items_of_a_sender_arrive_in_order_and_the_last_one_before_the_end(backend: Backend, capacity: int):
    """T2, S10: every sender is done, the receiver drains, then sees the end."""
    async with backend.procs() as procs, open_channel(tuple, capacity=capacity) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(senders.count.call, port, 100)
            items = await received(receiver, 1)
            await port.aclose()
            items += await rest(receiver)
        for rank in range(2):
            assert [index for sender, index in items if sender == rank] == list(range(100))
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive()
        with pytest.raises(trio.EndOfChannel):
            receiver.receive_nowait()


async def test_sender_is_done_before_the_receiver_begins(backend: Backend):
    """S10: what was sent is kept, and then the end comes."""
    async with backend.procs() as procs, open_channel(capacity=100) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        await senders.count.call(port, 50)
        await port.aclose()
        assert len(await rest(receiver)) == 100


async def test_items_that_were_sent_outlive_the_mesh(backend: Backend):
    """S10: a block that is left has sent what its actors have sent."""
    async with open_channel(bytes, capacity=40) as (port, receiver):
        async with backend.procs() as procs:
            senders = await procs.spawn("senders", Sender, port)
            await port.aclose()
            await senders.send.call(*[bytes(50_000) for _ in range(40)])
        items = await rest(receiver)
    assert len(items) == 80
    assert all(len(item) == 50_000 for item in items)


async def test_end_comes_when_the_creator_closes_the_only_port(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=1) as (port, receiver):
        await port.send(1)
        await port.aclose()
        assert await rest(receiver) == [1]


async def test_creators_port_keeps_the_channel_open(backend: Backend):
    """T2: it counts until `aclose`."""
    async with backend.procs() as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        await senders.send_item.call(port, 7)
        assert await received(receiver, 2) == [7, 7]
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        await port.send(8)
        assert await receiver.receive() == 8


async def test_clone_is_closed_by_itself(backend: Backend):
    async with backend.procs({"gpus": 1}), open_channel(int, capacity=4) as (port, receiver):
        other = port.clone()
        await port.aclose()
        await other.send(1)
        assert await receiver.receive() == 1
        async with other:
            await other.send(2)
        assert await rest(receiver) == [2]
        with pytest.raises(trio.ClosedResourceError):
            port.clone()


# ---- where ports may be ----------------------------------------------------------------------------------------------


class Holder:
    """Has a port among its attributes."""

    def __init__(self, port: Any) -> None:
        self.ports = {"one": [port]}


async def test_port_travels_as_argument_and_result(backend: Backend):
    """T2: what comes back is a port of the same channel, in the process of its receiver."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        returned = await sender.take.call_one(port)
        await port.aclose()
        await returned.send(1)
        assert await receiver.receive() == 1
        await returned.aclose()
        assert await rest(receiver) == []


@pytest.mark.by_value  # the value is of a class, and nothing says so
async def test_port_travels_inside_of_other_values(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        holder = await sender.take.call_one(Holder(port))
        twins = await sender.take.call_one((port, {port: port}))
        await port.aclose()
        assert twins[0] is twins[1][twins[0]]
        await holder.ports["one"][0].send(1)
        await twins[0].send(2)
        assert await received(receiver, 2) == [1, 2]
        del holder, twins
        gc.collect()
        assert await rest(receiver) == []


@pytest.mark.by_value  # a function goes by name without pickle, and leaves its closure
async def test_port_travels_in_the_closure_of_a_function(backend: Backend):
    """T2, V2: as if it were an argument."""
    async with backend.procs() as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)

        def give() -> Any:
            return port

        await senders.keep_call.call(give)
        await port.aclose()
        await senders.send.call(1)
        await senders.drop.call()
        assert await rest(receiver) == [1, 1]


@pytest.mark.by_value  # a class goes by name without pickle
async def test_port_travels_in_a_class_that_goes_by_value(backend: Backend):
    """T2, V2: by every road that the class takes; it lives there as long as the class, or until it is closed."""
    async with backend.procs() as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        one, two = (senders.slice(gpus=rank) for rank in range(2))

        class Carrier:
            ports = (port,)

        await one.keep_call.call(lambda: Carrier.ports[0])
        await one.send.call(1)
        await one.pass_on.call(two, Carrier)
        await two.keep_call.call(lambda: Carrier.ports[0])
        await two.send.call(2)
        await port.aclose()
        await senders.close.call()
        assert await rest(receiver) == [1, 2]


@pytest.mark.by_value  # a class goes by name without pickle
async def test_class_whose_port_is_never_used_holds_nothing_that_was_closed(backend: Backend):
    """T2: the definition was sent to the second process when its port was closed already."""
    async with backend.procs() as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        one, two = (senders.slice(gpus=rank) for rank in range(2))

        class Carrier:
            ports = (port,)

        await one.keep_call.call(lambda: Carrier.ports[0])
        await port.aclose()
        await two.keep_call.call(lambda: Carrier.ports[0])
        with pytest.raises(trio.ClosedResourceError):
            await two.send.call_one(1)
        await one.close.call()
        assert await rest(receiver) == []


async def test_port_is_an_argument_of_the_actor(backend: Backend):
    async with open_channel(int, capacity=4) as (port, receiver), backend.procs() as procs:
        senders = await procs.spawn("senders", Sender, port)
        await port.aclose()
        await senders.send.call(1)
        await senders.drop.call()
        assert await rest(receiver) == [1, 1]


async def greet(port: Any) -> None:
    await port.send(trimesh.current_rank())


@pytest.mark.by_value  # `setup` is a function, and goes by name without pickle
async def test_port_is_an_argument_of_setup(backend: Backend):
    async with open_channel(int, capacity=4) as (port, receiver):
        async with backend.procs(setup=partial(greet, port)):
            await port.aclose()
        assert sorted(await rest(receiver)) == [0, 1]


async def test_port_is_an_item_of_another_channel(backend: Backend):
    """T2: also one that is not received."""
    async with (
        backend.procs({"gpus": 1}) as procs,
        open_channel(int, capacity=4) as (port, receiver),
        open_channel(capacity=4) as (carrier, ports),
    ):
        sender = await procs.spawn("sender", Sender)
        await sender.send_item.call(carrier, [port, 1])
        await sender.send_item.call(carrier, [port, 2])
        await port.aclose()
        other, number = await ports.receive()
        await other.send(number)
        assert await receiver.receive() == 1
        await other.aclose()
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        await ports.aclose()
        assert await rest(receiver) == []


async def test_port_travels_with_an_exception(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        with pytest.raises(PortError) as caught:
            await sender.fail_with.call_one(port)
        await port.aclose()
        await caught.value.port.send(5)
        await caught.value.port.aclose()
        assert await rest(receiver) == [5]


async def test_port_travels_to_an_actor_of_this_process(backend: Backend):
    async with (
        backend.procs({"gpus": 1}),
        open_channel(tuple, capacity=1) as (port, receiver),
        this_proc().spawn("sender", Sender) as sender,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(sender.count.call, port, 10)
        assert await receiver.receive() == (0, 0)
        await port.aclose()
        assert len(await rest(receiver)) == 9


async def test_port_is_an_item_of_a_stream(backend: Backend):
    """T2: also one that is not taken, because the consumer has left."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=4) as (port, receiver):
        sender = await procs.spawn("sender", Sender)
        async with sender.lend.stream(port, 3) as results:
            await port.aclose()
            async for _, ours in results:
                await ours.send(5)
                await ours.aclose()
                break
        assert await rest(receiver) == [5]


async def test_worker_sends_to_a_worker(backend: Backend):
    """The controller has no part in the channel."""
    async with backend.procs() as procs, trio.open_nursery() as nursery:
        senders = await procs.spawn("senders", Sender)
        home, other = senders.slice(gpus=0), senders.slice(gpus=1)
        result = attempt(nursery, home.serve_to.call_one, other, 2)
        await other.wait_kept.call()
        await other.send.call(1, 2, 3)
        await other.drop.call()
        assert await result.result() == [1, 2, 3]


@pytest.mark.daily("real")
async def test_controller_sends_to_a_channel_of_a_worker(backend: Backend):
    async with backend.procs() as procs, open_channel(capacity=2) as (give_to, ports), trio.open_nursery() as nursery:
        senders = await procs.spawn("senders", Sender)
        result = attempt(nursery, senders.serve_channel.call, give_to, 2)
        for port in await received(ports, 2):
            for item in range(10):
                await port.send(item)
            await port.aclose()
        values = await result.result()
        assert list(values.values()) == [list(range(10))] * 2


async def test_port_is_passed_on_between_strangers(backend: Backend):
    """The controller's port goes from worker to worker; the one that has passed it on holds nothing."""
    async with backend.procs({"gpus": 3}) as procs, open_channel(int, capacity=4) as (port, receiver):
        senders = await procs.spawn("senders", Sender)
        one, two, three = (senders.slice(gpus=rank) for rank in range(3))
        await one.pass_on.call(two, port)
        await port.aclose()
        ours = await two.give.call_one()
        await two.drop.call()
        await one.pass_on.call(three, ours)
        await ours.aclose()
        await three.send.call(3)
        await three.close.call()
        assert await rest(receiver) == [3]
