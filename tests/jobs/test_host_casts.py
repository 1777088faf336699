"""Casts to several processes of other hosts: one copy enters each host, and nothing else changes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import Actor, HostLost, Isolate, MeshErrorGroup, endpoint, leaves, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh._runtime.hosts import casts
from trimesh._transport.messages.incoming import HostMemoryError
from trimesh._transport.native import link as links

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

MEBIBYTE = 1 << 20


def count_mappings() -> int:
    return Path("/proc/self/maps").read_text(errors="replace").count("trimesh-cast")


class Reader(Actor):
    """Reads what is cast."""

    def __init__(self) -> None:
        self.seen = list[tuple[int, int]]()
        self._go = trio.Event()

    @endpoint
    async def read(self, number: int, data: bytearray) -> tuple[int, int, bytes]:
        """Note it; what came can be written."""
        self.seen.append((number, len(data)))
        data[:1] = b"x"
        return number, len(data), bytes(data[-4:])

    @endpoint
    async def all_seen(self) -> list[tuple[int, int]]:
        return self.seen

    @endpoint
    async def agent(self) -> int:
        return parent_of(os.getppid())

    @endpoint
    async def map_nothing(self) -> None:
        """Be a process that may not look at memory of its agent."""

        def refuse(*_: object) -> Any:
            raise HostMemoryError("the test wants it")

        links.map_bodies = refuse  # type: ignore[assignment]

    @endpoint
    async def hold(self, data: bytearray) -> None:
        await trio.sleep_forever()

    @endpoint
    async def mappings(self) -> int:
        """Return how many memories of casts this process has mapped."""
        return count_mappings()


def session_of(hosts: Any, rank: int) -> Any:
    return hosts._owned.host.hosts[rank].host._pipe.session


def sent(hosts: Any) -> list[int]:
    """Return the bytes that were sent to each host."""
    return [session_of(hosts, rank).statistics().bytes_sent for rank in range(hosts.extent["hosts"])]


def under_a_cast(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something, once, when some of a body is on its way."""
    send, waiting = casts.send_everything, [act]

    async def some(channel: Any, data: bytes | memoryview) -> None:
        if len(data) > MEBIBYTE and waiting:
            now = waiting.pop()
            await send(channel, data[:MEBIBYTE])
            now()
            data = data[MEBIBYTE:]
        await send(channel, data)

    patch.setattr(casts, "send_everything", some)


@asynccontextmanager
async def readers(count: int = 2, **options: Any) -> AsyncGenerator[tuple[Any, Any], None]:
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(count) as hosts,
            hosts.spawn_procs({"gpus": 2}, **options) as procs,
            procs.spawn("readers", Reader) as actors,
        ):
            yield hosts, actors


@pytest.mark.daily
async def test_one_copy_of_a_cast_enters_each_host() -> None:
    """H6: it is mapped by all processes there; it is private to each."""
    data = bytearray(os.urandom(3 * MEBIBYTE))
    async with readers() as (hosts, actors):
        before = sent(hosts)

        found = list(await actors.read.call(1, data))

        assert found == [(1, len(data), bytes(data[-4:]))] * 4
        for more, less in zip(sent(hosts), before, strict=True):
            assert len(data) <= more - less < len(data) + limits.HOST_CAST_BYTES_MIN
        assert max(await actors.mappings.call()) <= 1


async def test_order_of_each_pair_holds_around_casts() -> None:
    """Small, cast, small: as sent, at each rank."""
    data = bytearray(MEBIBYTE)
    async with readers(1) as (_, actors):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                size = len(data) if number % 2 else 10
                nursery.start_soon(actors.read.call, number, data[:size])
                await trio.testing.wait_all_tasks_blocked()
        for seen in await actors.all_seen.call():
            assert [number for number, _ in seen] == list(range(6))


async def test_process_that_cannot_map_is_sent_its_own_copy() -> None:
    data = bytearray(os.urandom(MEBIBYTE))
    async with readers(1) as (_, actors):
        await actors.slice(gpus=1).map_nothing.call()

        for number in range(3):
            assert list(await actors.read.call(number, data)) == [(number, len(data), bytes(data[-4:]))] * 2
        for seen in await actors.all_seen.call():
            assert [number for number, _ in seen] == [0, 1, 2]


async def test_connection_that_breaks_under_a_cast_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3."""
    data = bytearray(os.urandom(16 * MEBIBYTE))
    async with readers(1) as (hosts, actors):
        session = session_of(hosts, 0)
        under_a_cast(monkeypatch, session.drop_connection)

        assert list(await actors.read.call(1, data)) == [(1, len(data), bytes(data[-4:]))] * 2
        assert session.statistics().connections == 2


async def test_cast_that_is_cancelled_is_cancelled_at_each_rank_and_its_memory_let_go() -> None:
    data = bytearray(4 * MEBIBYTE)
    async with readers(1) as (hosts, actors):
        with trio.move_on_after(0.05) as scope:
            await actors.hold.call(data)
        assert scope.cancelled_caught

        assert list(await actors.read.call(1, data[:10])) == [(1, 10, bytes(4))] * 2
        caster = hosts._owned.host.hosts[0].host._casts.caster
        while caster.kept:
            await trio.lowlevel.checkpoint()
        data += b"may be resized again"


async def test_lost_host_under_a_cast_is_lost_for_its_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4."""
    data = bytearray(8 * MEBIBYTE)
    async with readers(supervision=Isolate()) as (_, actors):
        agent = await actors.slice(hosts=1, gpus=0).agent.call_one()
        under_a_cast(monkeypatch, lambda: os.kill(agent, signal.SIGKILL))

        with pytest.raises(MeshErrorGroup) as caught:
            await actors.read.call(1, data)

        found = list(leaves(caught.value))
        assert {type(one) for one in found} == {HostLost}
        assert {dict(one.point or {})["hosts"] for one in found if isinstance(one, HostLost)} == {1}
        assert [one[:2] for one in await actors.slice(hosts=0).read.call(2, data)] == [(2, len(data))] * 2


@pytest.fixture
def is_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each host feed one other, whatever the size."""
    monkeypatch.setattr(limits, "HOST_CAST_HOP_BYTES", 1)


@pytest.mark.daily
@pytest.mark.usefixtures("is_chain")
async def test_hosts_feed_each_other() -> None:
    """H6: a large cast to three hosts leaves the program once."""
    data = bytearray(os.urandom(3 * MEBIBYTE))
    async with readers(3) as (hosts, actors):
        before = sent(hosts)

        for number in range(3):
            found = list(await actors.read.call(number, data))
            assert found == [(number, len(data), bytes(data[-4:]))] * 6

        assert sum(sent(hosts)) - sum(before) < 3 * (len(data) + limits.HOST_CAST_BYTES_MIN)


@pytest.mark.usefixtures("is_chain")
async def test_host_whose_feeder_is_lost_is_sent_the_cast_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4, HB-4."""
    data = bytearray(8 * MEBIBYTE)
    async with readers(3, supervision=Isolate()) as (_, actors):
        agent = await actors.slice(hosts=0, gpus=0).agent.call_one()
        under_a_cast(monkeypatch, lambda: os.kill(agent, signal.SIGKILL))

        await actors.read.broadcast(1, data)

        assert [len(seen) for seen in await actors.slice(hosts=slice(1, 3)).all_seen.call()] == [1] * 4


@pytest.mark.usefixtures("is_chain")
async def test_hosts_that_cannot_reach_each_other_are_sent_a_cast_by_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HB-4, NB-5: nothing goes through the program's host for that, so there is nothing to warn of."""
    data = bytearray(os.urandom(MEBIBYTE))
    monkeypatch.setenv("TRIMESH_DIRECT", "off")
    async with readers(3) as (hosts, actors):
        for number in range(2):
            assert list(await actors.read.call(number, data)) == [(number, len(data), bytes(data[-4:]))] * 6
        casters = [one.host._casts.caster for one in hosts._owned.host.hosts]
        assert [len(caster.unfed) for caster in casters] == [1, 1, 0]
    assert not caplog.records
