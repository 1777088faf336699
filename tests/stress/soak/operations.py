"""Each kind of operation alone, by whoever runs it: the controller, or an actor of a process that stays."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import trio

import trimesh
from trimesh import Actor, endpoint, this_proc

TRANSFER_BYTES = 1 << 20
"""Above what is copied in the call itself, so that the thread for transfers makes it."""

BODY_BYTES = 600_000
"""Far above what travels inline, so that it takes a segment."""

ITEMS = 20


class Peer(Actor):
    """The other side of the operations: it answers, publishes and owns memory."""

    def __init__(self) -> None:
        self.memory = bytearray(TRANSFER_BYTES)
        self.buffer = trimesh.RDMABuffer(self.memory)
        self.weights = trimesh.rdma.Published()

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @endpoint
    async def handle(self) -> trimesh.RDMABuffer:
        """Return the handle on the memory."""
        return self.buffer

    @endpoint
    async def publication(self) -> trimesh.rdma.Published:
        """Return the handle on the publication, which has a version."""
        await self.publish()
        return self.weights

    @endpoint
    async def publish(self) -> int:
        """Publish a version."""
        return await self.weights.publish({"w": self.memory, "b": self.memory[:100]})

    @endpoint(concurrency=4)
    async def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    @endpoint
    async def note(self, value: Any) -> None:
        """Take a broadcast."""

    @endpoint
    async def fail(self) -> None:
        """Raise an error with a payload and a cause."""
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("on purpose", bytes(1000)) from error

    @endpoint(concurrency=4, group="waiting")
    async def never(self) -> None:
        """Wait for the cancel."""
        await trio.sleep_forever()

    @endpoint(concurrency=4, group="items")
    async def count(self, items: int) -> AsyncGenerator[bytes, None]:
        """Yield so many items."""
        for number in range(items):
            yield bytes(number)

    @endpoint(concurrency=4, group="feeding")
    async def feed(self, port: Any, items: int) -> None:
        """Send so many items, and let go of the port."""
        async with port:
            for number in range(items):
                await port.send(number)

    @endpoint
    async def say(self) -> None:
        """Write to standard output."""
        print("x" * 200)


class Brief(Actor):
    """An actor that lives for one call."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @endpoint
    async def length(self) -> int:
        """Return the length of what it was made with."""
        return len(self.data)


class Operations:
    """What can be done with two peers.

    Attributes:
        peers: Of `Peer`.
        place: Where actors may be spawned: the owner's process mesh, or `this_proc()`.
    """

    def __init__(self, peers: Any, place: Any) -> None:
        self.peers = peers
        self.place = place
        self._first = peers.slice(gpus=0)
        self._kept: dict[str, Any] = {}

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Every kind, by name."""
        names = [name for name in vars(type(self)) if not name.startswith("_") and name != "kinds"]
        return {name: partial(getattr(self, name)) for name in names}

    async def _handle(self) -> trimesh.RDMABuffer:
        if "handle" not in self._kept:
            self._kept["handle"] = await self._first.handle.call_one()
        handle: trimesh.RDMABuffer = self._kept["handle"]
        return handle

    async def _publication(self) -> Any:
        if "publication" not in self._kept:
            self._kept["publication"] = await self._first.publication.call_one()
        return self._kept["publication"]

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def call(self) -> None:
        """A call of all."""
        await self.peers.echo.call(b"x" * 1000)

    async def body(self) -> None:
        """A large array there and back."""
        came = await self._first.echo.call_one(np.ones(BODY_BYTES, dtype=np.uint8))
        assert len(came) == BODY_BYTES

    async def large_bytes(self) -> None:
        """Bytes that go in parts."""
        assert len(await self._first.echo.call_one(bytes(4 * BODY_BYTES))) == 4 * BODY_BYTES

    async def broadcast(self) -> None:
        """Messages without an answer, and a call behind them."""
        for _ in range(ITEMS):
            await self.peers.note.broadcast(b"x" * 100)
        await self.peers.echo.call(0)

    async def error(self) -> None:
        """Errors that come back as a group."""
        try:
            await self.peers.fail.call()
        except* ValueError:
            pass

    async def cancel(self) -> None:
        """A call that is cancelled while it runs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.peers.never.call)
            await self.peers.echo.call(0)
            nursery.cancel_scope.cancel()

    async def deadline(self) -> None:
        """A call whose time is over."""
        with trio.move_on_after(0.002):
            await self.peers.never.call()

    async def stream(self) -> None:
        """Items of all members."""
        async with self.peers.count.stream(ITEMS) as results:
            found = [item async for _, item in results]
        assert len(found) == ITEMS * len(self.peers)

    async def stream_left(self) -> None:
        """A stream that is left early."""
        async with self.peers.count.stream(1000) as results:
            async for _ in results:
                break

    async def map(self) -> None:
        """Items spread over the members."""
        async with self.peers.echo.map(range(ITEMS)) as results:
            assert len([result async for result in results]) == ITEMS

    async def channel(self) -> None:
        """A channel whose port travels."""
        async with trimesh.open_channel(int, capacity=8) as (port, receiver):
            await self._first.feed.broadcast(port, ITEMS)
            await port.aclose()
            assert len([item async for item in receiver]) == ITEMS

    async def definition(self) -> None:
        """A function that travels by value."""
        marker = bytes(1000)
        came = await self._first.echo.call_one(lambda: len(marker))
        assert came() == len(marker)

    async def output(self) -> None:
        """Lines of output."""
        await self.peers.say.call()

    # ---- memory ------------------------------------------------------------------------------------------------------

    async def large_transfer(self) -> None:
        """A read into memory of its own, and a write."""
        handle, local = await self._handle(), bytearray(TRANSFER_BYTES)
        await handle.read_into(local)
        await handle.write_from(local)

    async def batch(self) -> None:
        """Parts read together."""
        handle, half = await self._handle(), TRANSFER_BYTES // 2
        async with trimesh.rdma.batch() as batch:
            batch.read(handle[:half], into=bytearray(half))
            batch.read(handle[half:], into=bytearray(half))

    async def grant(self) -> None:
        """Memory that is granted and taken back."""
        async with trimesh.RDMABuffer(bytearray(TRANSFER_BYTES)):
            pass

    async def pin(self) -> None:
        """A version that is published, pinned and read."""
        await self._first.publish.call_one()
        async with (await self._publication()).pin() as snapshot:
            await snapshot.read()

    async def publication(self) -> None:
        """A publication that comes and goes."""
        async with trimesh.rdma.Published() as weights:
            await weights.publish({"w": bytes(TRANSFER_BYTES)})

    # ---- actors ------------------------------------------------------------------------------------------------------

    async def actor_mesh(self) -> None:
        """An actor mesh that lives for one call."""
        async with self.place.spawn("brief", Brief, b"x" * 1000) as brief:
            await brief.length.call()


class Doer(Actor):
    """Does the operations from a process that stays."""

    def __init__(self, peers: Any) -> None:
        self.operations = Operations(peers, this_proc())

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @endpoint
    async def do(self, kind: str, times: int) -> None:
        """Do one kind of operation again and again."""
        operation = self.operations.kinds[kind]
        for _ in range(times):
            await operation()
