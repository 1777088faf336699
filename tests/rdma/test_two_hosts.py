"""Bulk data between two hosts: by tcp, with all that a host does for itself; and what a cut cable means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.rdma.namespaces import Namespace, sweep, two_namespaces, why_not

import trimesh
from trimesh import Actor, Isolate, ProcDied, RDMABuffer, Unresponsive, current_rank, endpoint, this_host
from trimesh.rdma import Published

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")]

SIZE = 5 << 20


@pytest.fixture
def hosts() -> Generator[tuple[Namespace, Namespace], None, None]:
    with two_namespaces() as made:
        yield made


def test_namespaces_of_killed_tests_are_swept(hosts: Any) -> None:
    """And no others: those of somebody who lives, or with another name."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f"trimesh-{gone.pid}-a"
    strange = f"trimesh-{gone.pid}-strange"
    for name in left, strange:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        sweep()
        names = {path.name for path in Path("/var/run/netns").iterdir()}
        assert left not in names
        assert names >= {strange, hosts[0].name, hosts[1].name}
    finally:
        subprocess.run(["ip", "netns", "del", strange], check=True)


def enter(hosts: tuple[Namespace, Namespace]) -> None:
    """The `setup` of a process: go to its host."""
    hosts[current_rank() % 2].enter()


def spawned(hosts: tuple[Namespace, Namespace], procs: int = 2, **options: Any) -> Any:
    """Spawn processes, even ranks on the one host and odd ones on the other."""
    return this_host().spawn_procs(
        {"procs": procs}, setup=partial(enter, hosts), env=lambda point: hosts[point.rank % 2].environment, **options
    )


class Member(Actor):
    """Has memory, and reaches that of others."""

    def __init__(self) -> None:
        self.memory = trimesh.rdma.allocate(SIZE)
        self.memory[:] = bytes([current_rank() + 1]) * SIZE
        self.buffer = RDMABuffer(self.memory)
        self.published = Published()

    @endpoint
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    async def publication(self) -> Published:
        return self.published

    @endpoint
    async def read(self, buffer: RDMABuffer) -> tuple[str, set[int]]:
        """Return what has carried it, and which bytes came."""
        local = bytearray(buffer.nbytes)
        await buffer.read_into(local)
        return buffer.backend, set(local)

    @endpoint
    async def write(self, buffer: RDMABuffer, byte: int) -> None:
        await buffer.write_from(bytes([byte]) * buffer.nbytes)

    @endpoint
    async def add(self, buffer: RDMABuffer, times: int) -> None:
        for _ in range(times):
            await buffer.fetch_add(1)

    @endpoint
    async def bytes_here(self) -> set[int]:
        return set(self.memory)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def first_word(self) -> int:
        return int.from_bytes(self.memory[:8], "little")

    @endpoint
    async def publish(self, version: int) -> int:
        return await self.published.publish({"a": bytes([version]) * 100_000})

    @endpoint
    async def follow(self, weights: Published, version: int) -> set[int]:
        await weights.wait_newer(version - 1)
        async with weights.pin() as snapshot:
            return set((await snapshot.read())["a"])


async def test_hosts_reach_each_other_by_tcp_and_themselves_by_memory(hosts: Any) -> None:
    async with spawned(hosts, 4) as procs:
        members = await procs.spawn("members", Member)
        first = members.slice(procs=0)
        handles = list((await members.handle.call()).values())
        assert await first.read.call_one(handles[1]) == ("tcp", {2})
        assert await first.read.call_one(handles[2]) == ("shm", {3})
        await first.write.call_one(handles[3], 9)
        assert await members.slice(procs=3).bytes_here.call_one() == {9}


async def test_atomics_of_two_hosts_add_up(hosts: Any) -> None:
    async with spawned(hosts, 4) as procs:
        members = await procs.spawn("members", Member)
        first = members.slice(procs=0)
        handle = await first.handle.call_one()
        await first.write.call_one(handle[:8], 0)
        await members.add.call(handle, 200)
        assert await first.first_word.call_one() == 800


async def test_publication_is_followed_on_another_host(hosts: Any) -> None:
    async with spawned(hosts) as procs:
        members = await procs.spawn("members", Member)
        trainer, generator = members.slice(procs=0), members.slice(procs=1)
        weights = await trainer.publication.call_one()
        for version in 1, 2, 3:
            assert await trainer.publish.call_one(version) == version
            assert await generator.follow.call_one(weights, version) == {version}


async def test_cut_cable_ends_a_read_in_bounded_time(hosts: Any) -> None:
    """The process lives, so it has not died: it does not answer."""
    async with spawned(hosts) as procs:
        members = await procs.spawn("members", Member)
        handle = await members.slice(procs=0).handle.call_one()
        reader = members.slice(procs=1)
        assert await reader.read.call_one(handle) == ("tcp", {1})
        hosts[0].cut()
        with trio.fail_after(60), pytest.raises(Unresponsive):
            await reader.read.call_one(handle)


async def test_owner_that_is_killed_on_another_host_has_died(hosts: Any) -> None:
    """The connection is lost, which says nothing: the host that has started it knows."""
    async with spawned(hosts, supervision=Isolate()) as procs:
        members = await procs.spawn("members", Member)
        owner, reader = members.slice(procs=0), members.slice(procs=1)
        handle = await owner.handle.call_one()
        assert await reader.read.call_one(handle) == ("tcp", {1})
        os.kill(await owner.pid.call_one(), signal.SIGKILL)
        with trio.fail_after(60), pytest.raises(ProcDied) as caught:
            while True:
                await reader.read.call_one(handle)
        assert caught.value.signal == signal.SIGKILL
