"""A consumer on another host that takes nothing: senders wait, memory stays bounded, the host is not given up."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of
from tests.stress.soak.gauges import resident_bytes

import trimesh
from trimesh import Actor, Failed, Isolate, Lagged, endpoint, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

MESSAGES = 192
MEBIBYTE = 1 << 20
GROWTH_BYTES = 64 * MEBIBYTE
"""Of one process, while three times as much is offered to it."""


class Consumer(Actor):
    """Takes messages when it is told to."""

    def __init__(self) -> None:
        self._port: trimesh.Port[bytes] | None = None
        self._receiver: trimesh.Receiver[bytes] | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Have a channel for as long as the actor lives."""
        async with trimesh.open_channel(bytes, capacity=4) as (self._port, self._receiver):
            yield

    @endpoint
    async def port(self) -> trimesh.Port[bytes]:
        """Return the port to it."""
        assert self._port is not None
        return self._port

    @endpoint(concurrency=2)
    async def pids(self) -> list[int]:
        """Return the processes through which messages come here: this one, the agent."""
        return [os.getpid(), parent_of(os.getppid())]

    @endpoint
    async def take(self, count: int) -> list[int]:
        """Take so many; return the first byte of each."""
        assert self._receiver is not None
        return [(await self._receiver.receive())[0] for _ in range(count)]

    @endpoint
    async def fail(self) -> None:
        """Be restarted."""
        raise ValueError("as the test wants it")


@pytest.mark.parametrize("held", [0.0, pytest.param(2 * limits.HOST_LEASE_SECONDS, marks=pytest.mark.stress)])
async def test_consumer_that_takes_nothing_holds_its_sender_alone(held: float) -> None:
    """H2, H3: it is offered 192 MiB; calls to it go on, and beats, for two leases in the long form."""
    sent = 0
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.slice(hosts=1).spawn_procs({}) as procs,
            procs.spawn("consumer", Consumer) as consumer,
            trio.open_nursery() as nursery,
        ):
            pids = [os.getpid(), *await consumer.pids.call_one()]
            port = await consumer.port.call_one()
            before = [resident_bytes(pid) for pid in pids]

            async def send() -> None:
                nonlocal sent
                for number in range(MESSAGES):
                    await port.send(bytes([number]) * MEBIBYTE)
                    sent += 1

            nursery.start_soon(send)
            calls, seen = 0, -1
            while calls < 200 or sent > seen:  # nothing more fits
                calls, seen = (calls + 1, seen) if sent == seen else (0, sent)
                assert await consumer.pids.call_one() == pids[1:]
            await trio.sleep(held)
            assert await consumer.pids.call_one() == pids[1:]
            grown = [resident_bytes(pid) - had for pid, had in zip(pids, before, strict=True)]
            assert sent < MESSAGES // 2
            assert max(grown) < GROWTH_BYTES, grown
            session = hosts._owned.host.hosts[1].host._pipe.session
            assert session.statistics().connections == 1
            assert await consumer.take.call_one(MESSAGES) == list(range(MESSAGES))


async def test_events_of_hosts_that_are_not_read_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """S09: a reader that is behind gets the newest, and the number of those that it has lost."""
    monkeypatch.setattr(limits, "EVENTS", 4)
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({}, supervision=Isolate()) as procs,
            procs.spawn("consumers", Consumer) as consumers,
            consumers.events() as slow,
            consumers.events() as quick,
        ):
            for _ in range(10):
                await consumers.fail.broadcast()
                failed = 0
                async for event in quick:
                    failed += isinstance(event, Failed)
                    if failed == 2:
                        break
            first = await anext(slow)
            rest = [await anext(slow) for _ in range(4)]
    assert first == Lagged(18), "the snapshot of both, and their first eight"
    assert [type(one) for one in rest] == [Failed] * 4
