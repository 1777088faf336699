"""What the tests of hosts in network namespaces spawn there, and how they look at it from outside."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
from tests.runtime.processes import parent_of

import trimesh
from trimesh import Actor, endpoint
from trimesh._native import tls
from trimesh.testing import why_no_networks

needs_network = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(why_no_networks() is not None, reason=str(why_no_networks())),
]
"""Marks of a module whose tests make networks."""


Numbered = tuple[int, int]
"""The rank of a host, and the number of what it has sent."""


class Teller(Actor):
    """Numbers what it sends."""

    @endpoint
    async def pids(self) -> list[int]:
        """Return the process ids of this process, its spawner and the agent."""
        spawner = os.getppid()
        return [os.getpid(), spawner, parent_of(spawner)]

    @endpoint(concurrency=2)
    async def tell(self, port: trimesh.Port[Numbered]) -> None:
        """Send numbers without end."""
        number = 0
        async with port:
            while True:
                await port.send((trimesh.current_point()["hosts"], number))
                number += 1
                await trio.sleep(0.005)

    @endpoint(concurrency=2)
    async def sleep(self) -> None:
        await trio.sleep_forever()


@contextmanager
def watching(pids: Iterable[int]) -> Any:
    """Have descriptors of processes, which cannot come to mean others, while the body runs."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield pidfds
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


async def wait_gone(pidfds: Iterable[int]) -> None:
    """Wait until processes have ended."""
    for pidfd in pidfds:
        await trio.lowlevel.wait_readable(pidfd)


class Told:
    """What has come of tellers, by the rank of their host.

    Attributes:
        numbers: In the order in which they came.
    """

    def __init__(self, hosts: int) -> None:
        self.numbers = [list[int]() for _ in range(hosts)]
        self._came = trio.lowlevel.ParkingLot()

    async def take(self, receiver: trimesh.Receiver[Numbered]) -> None:
        """Take what comes, without end."""
        async for host, number in receiver:
            self.numbers[host].append(number)
            self._came.unpark_all()

    async def more(self, hosts: Iterable[int], count: int) -> None:
        """Wait until so many more have come from each of some hosts."""
        wanted = {host: len(self.numbers[host]) + count for host in hosts}
        while any(len(self.numbers[host]) < number for host, number in wanted.items()):
            await self._came.park()

    @property
    def is_whole(self) -> bool:
        """Whether what has come of each is all up to a number, once, in order."""
        return all(numbers == list(range(len(numbers))) for numbers in self.numbers)


@asynccontextmanager
async def telling(tellers: Any, hosts: int) -> AsyncGenerator[Told, None]:
    """Have tellers send while the body runs."""
    told = Told(hosts)
    async with trimesh.open_channel(Numbered, capacity=64) as (port, receiver), trio.open_nursery() as nursery:
        nursery.start_soon(told.take, receiver)
        async with port:
            await tellers.tell.broadcast(port)
        yield told
        nursery.cancel_scope.cancel()
