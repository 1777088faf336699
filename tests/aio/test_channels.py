"""Channels from asyncio (K04): both ends are used in its tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, Port, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Sender(Actor):
    @endpoint
    async def count(self, port: Port[int], end: int) -> None:
        async with port:
            for number in range(end):
                await port.send(number)

    @endpoint
    async def hold(self, port: Port[int]) -> None:
        async with port:
            await trio.sleep_forever()


def test_channel_receives_in_asyncio(run):
    """T2, S10, K04: items of all senders, each in order, then the end of the channel."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            senders = await procs.spawn("senders", Sender)
            async with trimesh.open_channel(int, capacity=4) as (port, receiver):
                async with port:
                    await senders.count.broadcast(port, 50)
                assert sorted([item async for item in receiver]) == sorted([*range(50), *range(50)])

    run(main)


def test_both_ends_in_asyncio(run):
    """T2, K04: send waits for room, `clone`, the sync methods, and the errors of Trio."""

    async def main():
        async with trimesh.aio.open_trio(), trimesh.open_channel(int, capacity=1) as (port, receiver):
            other = port.clone()
            other.send_nowait(1)
            with pytest.raises(trio.WouldBlock):
                port.send_nowait(2)
            sending = asyncio.create_task(port.send(2))
            await asyncio.sleep(0.01)
            assert not sending.done()
            assert receiver.receive_nowait() == 1
            await sending
            assert await receiver.receive() == 2
            port.close()
            await other.aclose()
            with pytest.raises(trio.EndOfChannel):
                await receiver.receive()
            with pytest.raises(trio.ClosedResourceError):
                await other.send(3)

    run(main)


def test_cancelled_receive_has_taken_nothing(run):
    """T2, K04: whenever the cancel comes, no item is lost and none comes twice."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            sender = await procs.spawn("sender", Sender)
            async with trimesh.open_channel(int, capacity=2) as (port, receiver):
                async with port:
                    await sender.count.broadcast(port, 40)
                found: list[Any] = []
                while len(found) < 40:
                    try:
                        async with asyncio.timeout(0):
                            found.append(await receiver.receive())
                    except TimeoutError:
                        found.append(await receiver.receive())
                assert found == list(range(40))

    run(main)


def test_timeout_ends_a_receive(run):
    """T2, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            sender = await procs.spawn("sender", Sender)
            async with trimesh.open_channel(int, capacity=2) as (port, receiver):
                holding = asyncio.create_task(sender.hold.call_one(port))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await receiver.receive()
                holding.cancel()
                await asyncio.wait([holding])

    run(main)
