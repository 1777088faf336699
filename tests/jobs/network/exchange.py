"""Processes on several hosts that send each other numbered messages, and what each has received of each.

EX-1 What comes of one sender is numbered without a gap and without a repeat, and each message is what was sent.
EX-2 When all that was sent is known to have come, nothing more comes.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

import pytest
import trio

import trimesh
from trimesh import Actor, HostLost, endpoint

Message = tuple[int, int, int, bytes]
"""Who has sent it, its number among those to this receiver, a checksum of both and the rest, the rest."""

SIZES = (0, 10, 100, 100, 1000)
"""Of the rest, in bytes; now and then one is `LARGE`."""

LARGE = 100_000
EVERY_LARGE = 500


def message(sender: int, receiver: int, number: int) -> Message:
    """Return the message of a number."""
    size = LARGE if number % EVERY_LARGE == EVERY_LARGE - 1 else SIZES[(sender + receiver + number) % len(SIZES)]
    rest = bytes([(sender * 31 + number) % 256]) * size
    return sender, number, checksum(sender, receiver, number, rest), rest


def checksum(sender: int, receiver: int, number: int, rest: bytes) -> int:
    return zlib.crc32(rest, zlib.crc32(b"%d %d %d" % (sender, receiver, number)))


class Correspondent(Actor):
    """Sends to all others, and looks at what comes."""

    def __init__(self) -> None:
        self.own = -1
        self.sent = 0
        self.received = dict[int, int]()
        self.wrong = list[str]()
        self._ports = dict[int, trimesh.Port[Message]]()
        self._port: trimesh.Port[Message] | None = None
        self._came = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Receive for as long as the actor lives."""
        async with (
            trimesh.open_channel(Message, capacity=256) as (self._port, receiver),
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._receive, receiver)
            yield
            nursery.cancel_scope.cancel()

    async def _receive(self, receiver: trimesh.Receiver[Message]) -> None:
        async for sender, number, code, rest in receiver:
            expected = self.received.get(sender, 0)
            if number != expected:
                self.wrong.append(f"{self.own} got {number} of {sender} where {expected} is next")
            if code != checksum(sender, self.own, number, rest):
                self.wrong.append(f"{self.own} got a damaged {number} of {sender}")
            self.received[sender] = number + 1
            self._came.unpark_all()

    @endpoint
    async def begin(self, own: int) -> trimesh.Port[Message]:
        """Learn its number; return the port to itself."""
        assert self._port is not None
        self.own = own
        return self._port

    @endpoint
    async def meet(self, ports: dict[int, trimesh.Port[Message]]) -> None:
        """Learn how to send to the others."""
        self._ports = {number: port for number, port in ports.items() if number != self.own}

    @endpoint(concurrency=4)
    async def send(self, count: int) -> None:
        """Send so many more messages to each of the others."""
        first, self.sent = self.sent, self.sent + count
        async with trio.open_nursery() as nursery:
            for receiver, port in self._ports.items():
                nursery.start_soon(self._send_to, receiver, port, range(first, first + count))

    async def _send_to(self, receiver: int, port: trimesh.Port[Message], numbers: range) -> None:
        try:
            for number in numbers:
                await port.send(message(self.own, receiver, number))
        except trio.BrokenResourceError as error:
            if not isinstance(error.__cause__, (trimesh.ProcDied, trimesh.HostLost)):
                raise

    @endpoint(concurrency=4)
    async def wait_received(self, count: int, others: list[int]) -> None:
        """Wait until so many have come from each of the others, or one that is wrong."""
        while not self.wrong and any(self.received.get(one, 0) < count for one in others if one != self.own):
            await self._came.park()

    @endpoint(concurrency=4)
    async def sleep(self) -> None:
        await trio.sleep_forever()

    @endpoint(concurrency=4)
    async def report(self) -> tuple[dict[int, int], list[str]]:
        """Return how many have come from each, and what was wrong."""
        return self.received, self.wrong


class Exchange:
    """All correspondents of a test.

    Attributes:
        members: Actor meshes of one member each, by number, those of hosts that live.
        hosts: The rank of the host of each.
        sent: Messages from each of them to each other one.
        total: Messages that were sent by those who lived until the end of their round, to such.
    """

    def __init__(self, members: list[Correspondent], hosts: list[int]) -> None:
        self.members = dict(enumerate(members))
        self.hosts = hosts
        self.sent = 0
        self.total = 0

    async def begin(self) -> None:
        """Make all known to all."""
        ports = {number: await one.begin.call_one(number) for number, one in self.members.items()}
        for one in self.members.values():
            await one.meet.call_one(ports)

    async def round(self, count: int) -> None:
        """Send so many messages from each to each other one, and wait until all have come."""
        self.sent += count
        await self._all(lambda one: self._send_and_wait(one, count, [*self.members]))
        self.total += count * len(self.members) * (len(self.members) - 1)

    async def last_round(self, count: int, doomed: Collection[int]) -> None:
        """Send as `round` does while some hosts are lost; what is between the others must come."""
        self.sent += count
        lost = {number: one for number, one in self.members.items() if self.hosts[number] in doomed}
        self.members = {number: one for number, one in self.members.items() if number not in lost}
        async with trio.open_nursery() as nursery:
            for one in lost.values():
                nursery.start_soon(_be_lost, one, count)
            await self._all(lambda one: self._send_and_wait(one, count, [*self.members]))
        self.total += count * len(self.members) * (len(self.members) - 1)

    async def _send_and_wait(self, one: Correspondent, count: int, others: list[int]) -> None:
        await one.send.call_one(count)
        await one.wait_received.call_one(self.sent, others)

    async def _all(self, each: Callable[[Correspondent], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            for one in self.members.values():
                nursery.start_soon(each, one)

    async def reports(self) -> dict[int, dict[int, int]]:
        """Return how many messages each has of each; none was damaged, came twice, or out of order."""
        found = dict[int, dict[int, int]]()
        for number, one in self.members.items():
            found[number], wrong = await one.report.call_one()
            assert wrong == []
        return found

    async def check(self) -> None:
        """Find what was lost, came twice, out of order, or damaged."""
        for own, received in (await self.reports()).items():
            among = {number: count for number, count in received.items() if number in self.members}
            assert among == {number: self.sent for number in self.members if number != own}


async def _be_lost(one: Correspondent, count: int) -> None:
    with pytest.raises(HostLost):
        await one.send.call_one(count)
        await one.sleep.call_one()


@asynccontextmanager
async def exchange_on(
    hosts: trimesh.HostMesh, extent: Mapping[str, int], policy: trimesh.Policy | None = None, *, members: int = 8
) -> AsyncGenerator[Exchange, None]:
    """Have processes on hosts exchange messages: the first so many of those that are spawned."""
    async with hosts.spawn_procs(extent, supervision=policy) as procs, procs.spawn("c", Correspondent) as actors:
        points = list(actors.points())[:members]
        exchange = Exchange([actors.slice(**point) for point in points], [point["hosts"] for point in points])
        await exchange.begin()
        yield exchange
