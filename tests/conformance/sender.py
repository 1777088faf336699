"""The actor that the channel tests give ports to, and how they receive."""

from __future__ import annotations

from typing import Any

import trio

import trimesh
from trimesh import Actor, endpoint


class PortError(Exception):
    """An exception with a port."""

    def __init__(self, port: Any) -> None:
        super().__init__("with a port")
        self.port = port


class Sender(Actor):
    """Keeps ports, sends to them, passes them on; opens a channel of its own."""

    def __init__(self, port: Any = None) -> None:
        self.port = port
        self.kept = trio.Event()
        self.blocked = trio.Event()
        self.sent = 0
        self.moved = trio.Event()
        self.receiver: Any = None
        self.nursery: Any = None

    # ---- ports -----------------------------------------------------------------------------------------------

    @endpoint
    async def keep(self, port: Any) -> None:
        self.port = port
        self.kept.set()

    @endpoint(concurrency=100)
    async def wait_kept(self) -> None:
        await self.kept.wait()

    @endpoint
    async def keep_call(self, make: Any) -> None:
        """Keep what a function returns."""
        self.port = make()

    @endpoint
    async def drop(self) -> None:
        """Drop the port without closing it."""
        self.port = None

    @endpoint
    async def close(self) -> None:
        await self.port.aclose()

    @endpoint
    async def give(self) -> Any:
        return self.port

    @endpoint
    async def take(self, port: Any) -> Any:
        """Give an argument back."""
        return port

    @endpoint
    async def lend(self, port: Any, count: int) -> Any:
        """Give an argument back, that many times."""
        for _ in range(count):
            yield port

    @endpoint
    async def fail_with(self, port: Any) -> None:
        raise PortError(port)

    @endpoint
    async def fail(self, port: Any) -> None:
        """Fail with the port in a frame of the traceback."""
        await port.send("failing")
        raise ValueError("with a port in a frame")

    @endpoint(concurrency=100)
    async def relay(self, target: Any, port: Any) -> None:
        """Let another endpoint fail, and fail by that."""
        await target.fail.call(port)

    @endpoint
    async def pass_on(self, target: Any, port: Any) -> None:
        """Give a port to another actor, and forget it."""
        await target.keep.call(port)

    @endpoint
    async def send_item(self, port: Any, item: Any) -> None:
        await port.send(item)

    # ---- sending ---------------------------------------------------------------------------------------------

    @endpoint
    async def send(self, *items: Any) -> None:
        """Send to the port that was kept."""
        for item in items:
            await self.port.send(item)

    @endpoint
    async def send_nowait(self, item: Any) -> int:
        """Try until it is sent; return how often it would have blocked."""
        refused = 0
        while True:
            try:
                self.port.send_nowait(item)
            except trio.WouldBlock:
                refused += 1
                await trio.lowlevel.checkpoint()
            else:
                return refused

    @endpoint
    async def count(self, port: Any, number: int) -> None:
        """Send (rank, 0), (rank, 1), ..."""
        for index in range(number):
            await port.send((trimesh.current_rank(), index))

    @endpoint(concurrency=100)
    async def pour(self, item: Any = None) -> None:
        """Send until cancelled, or until it fails."""
        while True:
            await self.port.send(item)
            self.sent += 1
            self.moved.set()
            self.moved = trio.Event()

    @endpoint(concurrency=100)
    async def wait_sent(self, count: int) -> int:
        while self.sent < count:
            await self.moved.wait()
        return self.sent

    @endpoint(concurrency=100)
    async def count_sent(self) -> int:
        return self.sent

    @endpoint(concurrency=100)
    async def hold(self, port: Any = None) -> None:
        """Hold the port of an argument until cancelled."""
        await trio.sleep_forever()

    @endpoint
    async def block(self, port: Any = None) -> None:
        """Occupy the actor's one slot."""
        self.blocked.set()
        await trio.sleep_forever()

    @endpoint(concurrency=100)
    async def wait_blocked(self) -> None:
        await self.blocked.wait()

    # ---- a channel of its own --------------------------------------------------------------------------------

    @endpoint(concurrency=100)
    async def serve_channel(self, give_to: Any, capacity: int) -> list[Any]:
        """Open a channel, send its port to another channel, return what comes."""
        async with trimesh.open_channel(capacity=capacity) as (port, receiver):
            await give_to.send(port)
            await port.aclose()
            return [item async for item in receiver]

    @endpoint(concurrency=100)
    async def serve_to(self, target: Any, capacity: int) -> list[Any]:
        """Open a channel, let another actor keep its port, return what comes."""
        async with trimesh.open_channel(capacity=capacity) as (port, receiver):
            await target.keep.call(port)
            await port.aclose()
            return [item async for item in receiver]

    @endpoint(concurrency=100)
    async def block_channel(self, target: Any, capacity: int) -> None:
        """Open a channel, let another actor keep its port, and receive nothing."""
        async with trimesh.open_channel(capacity=capacity) as (port, _receiver):
            await target.keep.call(port)
            await trio.sleep_forever()

    @endpoint(concurrency=100)
    async def hold_channel(self, give_to: Any) -> None:
        """Open a channel and receive nothing."""
        async with trimesh.open_channel(capacity=1) as (port, _receiver):
            await give_to.send(port)
            await trio.sleep_forever()


async def received(receiver: Any, count: int) -> list[Any]:
    """Return the next `count` items."""
    return [await receiver.receive() for _ in range(count)]


async def rest(receiver: Any) -> list[Any]:
    """Return all items up to the end."""
    return [item async for item in receiver]
