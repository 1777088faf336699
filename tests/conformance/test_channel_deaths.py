"""Processes that die while they hold, lend, get or receive (T2): every channel ends, no sender waits in vain."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, kinds, only_real, only_sim, tick
from tests.conformance.sender import Sender, received, rest

from trimesh import MeshErrorGroup, ProcDied, RemoteTraceback, Restart, Restarted, limits, open_channel


@asynccontextmanager
async def doomed(backend: Backend, per_host: dict[str, int] | None = None) -> AsyncGenerator[Any, None]:
    """Spawn senders of whom the body lets one die; the block of the caller goes on."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(per_host or {"gpus": 1}) as procs:
            yield await procs.spawn("doomed", Sender)
            await trio.sleep_forever()
    assert ProcDied in kinds(caught.value)


async def test_dead_holder_ends_the_channel_after_what_it_has_sent(backend: Backend):
    """T2: the last item comes before the end."""
    async with open_channel(int, capacity=8) as (port, receiver):
        async with doomed(backend) as sender:
            await sender.keep.call(port)
            await port.aclose()
            await sender.send.call(1, 2, 3)
            backend.kill(sender, 0)
        assert await rest(receiver) == [1, 2, 3]


async def test_dead_holder_ends_the_wait_of_a_receiver(backend: Backend):
    async with open_channel(int, capacity=8) as (port, receiver), trio.open_nursery() as nursery:
        waiting = attempt(nursery, rest, receiver)
        async with doomed(backend) as sender:
            await sender.keep.call(port)
            await port.aclose()
            backend.kill(sender, 0)
        assert await waiting.result() == []


async def test_one_dead_holder_of_two_ends_nothing(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=8) as (port, receiver):
        other = await procs.spawn("other", Sender)
        await other.keep.call(port)
        async with doomed(backend) as sender:
            await sender.keep.call(port)
            await port.aclose()
            backend.kill(sender, 0)
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        await other.send.call(1)
        await other.drop.call()
        assert await rest(receiver) == [1]


async def test_message_dies_with_the_process_that_has_it_in_its_mailbox(backend: Backend):
    """T2: it was delivered, and never run."""
    async with open_channel(int, capacity=8) as (port, receiver), trio.open_nursery() as nursery:
        async with doomed(backend) as sender:
            calls = [attempt(nursery, sender.block.call_settled)]
            await sender.wait_blocked.call()
            calls += [attempt(nursery, sender.keep.call_settled, port) for _ in range(limits.MAILBOX_MESSAGES + 3)]
            await sender.count_sent.call()
            await port.aclose()
            backend.kill(sender, 0)
        del calls
        assert await rest(receiver) == []


@pytest.mark.daily("real")
async def test_home_that_dies_breaks_the_ports(backend: Backend):
    """T2: those who wait for room, and those who come later, learn how it died."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        sender = await procs.spawn("sender", Sender)
        async with doomed(backend) as home:
            serving = attempt(nursery, home.block_channel.call_settled, sender, 2)
            await sender.wait_kept.call()
            pouring = attempt(nursery, sender.pour.call_settled, 1)
            await sender.wait_sent.call(2)
            backend.kill(home, 0)
        for outcome in [*(await pouring.result()).values(), *(await sender.send.call_settled(1)).values()]:
            assert isinstance(outcome.error, trio.BrokenResourceError)
            assert isinstance(outcome.error.__cause__, ProcDied | RemoteTraceback)
            assert "ProcDied" in "".join(map(str, causes(outcome.error)))
        del serving


def causes(error: BaseException) -> list[object]:
    """Return the chain of causes, with the types."""
    found: list[object] = []
    cause = error.__cause__
    while cause is not None:
        found += [type(cause).__name__, cause]
        cause = cause.__cause__
    return found


async def test_home_that_dies_breaks_the_port_of_the_controller(backend: Backend):
    async with trio.open_nursery() as nursery, open_channel(capacity=1) as (give_to, ports):
        async with doomed(backend) as home:
            serving = attempt(nursery, home.hold_channel.call_settled, give_to)
            port = await ports.receive()
            await port.send(1)
            blocked = attempt(nursery, port.send, 2)
            await tick(5)
            backend.kill(home, 0)
        with pytest.raises(trio.BrokenResourceError) as caught:
            await blocked.result()
        assert isinstance(caught.value.__cause__, ProcDied)
        with pytest.raises(trio.BrokenResourceError):
            port.send_nowait(3)
        del serving


@pytest.mark.parametrize("capacity", [0, 3])
async def test_worker_that_holds_dies_and_its_home_is_a_stranger(backend: Backend, capacity: int):
    """The home has no link to the holder but the one that it makes for this."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        home = await procs.spawn("home", Sender)
        async with doomed(backend) as sender:
            result = attempt(nursery, home.serve_to.call_one, sender, capacity)
            await sender.wait_kept.call()
            await sender.send.call(1, 2)
            backend.kill(sender, 0)
        assert await result.result() == [1, 2]


async def test_lender_that_dies_leaves_the_port_to_whom_it_gave_it(backend: Backend):
    """T2: the one it was passed on to holds it by itself."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=8) as (port, receiver):
        heir = await procs.spawn("heir", Sender)
        async with doomed(backend) as lender:
            await lender.pass_on.call(heir, port)
            await port.aclose()
            backend.kill(lender, 0)
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        await heir.send.call(4)
        await heir.drop.call()
        assert await rest(receiver) == [4]


async def test_lender_that_dies_takes_its_unread_message_with_it(backend: Backend):
    """T2: the heir was busy; the call of a dead caller is not run, and what it carried is given back."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=8) as (port, receiver):
        heir = await procs.spawn("heir", Sender)
        async with trio.open_nursery() as nursery:
            blocking = attempt(nursery, heir.block.call)
            await heir.wait_blocked.call()
            async with doomed(backend) as lender:
                passing = attempt(nursery, lender.pass_on.call_settled, heir, port)
                await lender.count_sent.call()
                await port.aclose()
                backend.kill(lender, 0)
            assert await rest(receiver) == []
            blocking.cancel()
        del passing


async def test_replacement_of_a_dead_process_gets_the_port_that_it_had(backend: Backend):
    """T2, P1: a port among the arguments of an actor is one of each incarnation, as long as its owner keeps it open."""
    async with (
        open_channel(int, capacity=8) as (port, receiver),
        backend.procs({"gpus": 1}, supervision=Restart(intensity=3, period=60)) as procs,
    ):
        sender = await procs.spawn("sender", Sender, port)
        await sender.send.call(1)
        async with procs.events() as events:
            backend.kill(sender, 0)
            async for event in events:
                if isinstance(event, Restarted):
                    break
        await sender.send.call(2)
        await port.aclose()
        with pytest.raises(trio.WouldBlock):
            await received(receiver, 2)
            receiver.receive_nowait()
        await sender.close.call()
        assert await rest(receiver) == []


@only_sim
@pytest.mark.parametrize("ticks", range(0, 60, 3))
async def test_lender_that_dies_at_any_moment(backend: Backend, ticks: int):
    """T2: wherever the port was, its channel ends once the heir has none."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=8) as (port, receiver):
        heir = await procs.spawn("heir", Sender)
        async with trio.open_nursery() as nursery:
            async with doomed(backend) as lender:
                passing = attempt(nursery, lender.pass_on.call_settled, heir, port)
                await tick(ticks)
                await port.aclose()
                backend.kill(lender, 0)
            await heir.drop.call()
            assert await rest(receiver) == []
        del passing


@only_real
async def test_items_of_a_killed_sender_are_a_beginning_of_what_it_sent(backend: Backend):
    """T2, S01: nothing is lost before something that arrives."""
    async with open_channel(tuple, capacity=5) as (port, receiver), trio.open_nursery() as nursery:
        async with doomed(backend) as sender:
            counting = attempt(nursery, sender.count.call_settled, port, 100_000)
            items = await received(receiver, 50)
            await port.aclose()
            backend.kill(sender, 0)
        items += await rest(receiver)
        assert items == [(0, index) for index in range(len(items))]
        del counting
