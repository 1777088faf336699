"""Messages between two hosts, by a session of the two: directly while that is possible, else through the program's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from tests.jobs.network.exchange import Exchange, exchange_on
from tests.jobs.network.observing import needs_network, wait_gone, watching
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import Actor, HostLost, Isolate, Restart, endpoint, limits

pytest.importorskip("cryptography")

from trimesh.testing import HostNetwork, NetworkJob, open_host_network
from trimesh.testing.real.host_network import CONTROLLER

pytestmark = needs_network

PAUSE = 0.02
"""Between two looks at connections, of which no event tells."""

RELAYED_ROUND_BYTES = 8 * 50
"""The least that comes to the program of a round that goes through it: eight messages."""


@attrs.frozen
class Run:
    """An exchange of the processes of two hosts, two on each."""

    network: HostNetwork
    hosts: Any
    exchange: Exchange

    def through_program(self) -> int:
        """Return how many bytes have come to the program from the hosts."""
        return sum(place.host._pipe.session.statistics().bytes_received for place in self.hosts._owned.host.hosts)

    async def wait_connections(self, wanted: int) -> None:
        """Exchange messages until there are so many connections between the two hosts."""
        while self.network.connections(0, 1) != wanted:
            await self.exchange.round(10)
            await trio.sleep(PAUSE)

    async def wait_direct(self) -> None:
        """Exchange messages until they leave the program alone: a connection is there before its session uses it."""
        while True:
            before = self.through_program()
            await self.exchange.round(10)
            if self.through_program() - before < 10 * RELAYED_ROUND_BYTES:
                return
            await trio.sleep(PAUSE)


@asynccontextmanager
async def exchanging(network: HostNetwork, direct: str = "") -> AsyncGenerator[Run, None]:
    with trio.fail_after(HANG_SECONDS):
        async with NetworkJob(network, direct=direct) as hosts, exchange_on(hosts, {"gpus": 2}) as exchange:
            yield Run(network, hosts, exchange)
            await exchange.check()


async def test_two_hosts_have_one_connection_which_leaves_the_program_alone_and_may_break() -> None:
    """H3, H5: four processes on two hosts; each reset is another connection of the same session."""
    broken = 0
    with open_host_network(2) as network:
        async with exchanging(network) as run:
            await run.exchange.round(50)
            assert network.connections(0, 1) == 1
            before = run.through_program()
            await run.exchange.round(500)  # a large one of 100 kB in each of eight directions
            assert run.through_program() - before < limits.HOST_WINDOW_BYTES
            assert network.connections(0, 1) == 1
            network.limit([0, 1], 40_000_000)
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run.exchange.round, 200)
                    await trio.sleep(0.05)  # the moment is what is varied
                    broken += network.reset([0])
                await run.wait_connections(1)
    assert broken >= 6, "each time one with the program, and one with the other host"


async def test_direct_path_that_ends_and_comes_again_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """H5: direct, then relayed, then direct: each message comes once, in order, and the relay is said once."""
    with open_host_network(2) as network, caplog.at_level(logging.WARNING, "trimesh"):
        async with exchanging(network) as run:
            await run.exchange.round(50)
            for _ in range(2):
                heal = network.part([0], [1])
                before = run.through_program()
                await run.exchange.round(50)  # waits until the connection is given up
                assert run.through_program() > before
                heal()
                await run.wait_connections(1)
                await run.wait_direct()
                before = run.through_program()
                await run.exchange.round(500)
                assert run.through_program() - before < limits.HOST_WINDOW_BYTES
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "directly, so their messages go through the host of this program" in said[0]


async def test_hosts_that_do_not_reach_each_other_are_relayed(caplog: pytest.LogCaptureFixture) -> None:
    """H5: after a bound, said once; the first message waits for no longer."""
    with open_host_network(2) as network, caplog.at_level(logging.WARNING, "trimesh"):
        network.part([0], [1])
        async with exchanging(network) as run:
            since = time.monotonic()
            await run.exchange.round(1)
            assert time.monotonic() - since < 3 * limits.DIRECT_DIAL_SECONDS
            await run.exchange.round(50)
            assert network.connections(0, 1) == 0
    assert len(caplog.records) == 1
    assert f"{network.address(0)}:" in caplog.text or f"{network.address(1)}:" in caplog.text


async def test_no_agent_listens_where_direct_is_off() -> None:
    """H5: the job decides; all messages go through the program's host."""
    with open_host_network(2) as network:
        async with exchanging(network, direct="off") as run:
            before = run.through_program()
            await run.exchange.round(50)
            assert run.through_program() - before > 50 * RELAYED_ROUND_BYTES
            assert network.connections(0, 1) == 0
            assert network.listening(0) == network.listening(1) == 0


class Neighbour(Actor):
    """Calls the others of its mesh."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    async def pids(self) -> list[int]:
        return [os.getpid(), os.getppid(), parent_of(os.getppid())]

    @endpoint(concurrency=4)
    async def count(self) -> int:
        self.calls += 1
        return self.calls

    @endpoint(concurrency=4)
    async def ask(self, other: Any) -> int:
        return int(await other.count.call_one())

    @endpoint(concurrency=4)
    async def ask_until_lost(self, other: Any) -> tuple[int, str]:
        """Call another one until that fails; return how often it has answered, and why it was lost."""
        answers = 0
        try:
            while True:
                answers = int(await other.count.call_one())
        except HostLost as error:
            return answers, error.reason

    @endpoint(concurrency=4)
    async def sleep(self) -> None:
        await trio.sleep_forever()


async def test_host_that_only_the_program_has_lost_has_no_session_any_more() -> None:
    """H4, H5: two hosts reach each other, and the program one of them: all of the other one ends, and is told once."""
    with open_host_network(2) as network, trio.fail_after(HANG_SECONDS):
        async with (
            NetworkJob(network) as hosts,
            hosts.spawn_procs({}, supervision=Isolate()) as procs,
            procs.spawn("neighbours", Neighbour) as neighbours,
        ):
            one, two = neighbours.slice(hosts=0), neighbours.slice(hosts=1)
            pids = await two.pids.call_one()
            assert await one.ask.call_one(two) == 1
            assert network.connections(0, 1) == 1
            with watching(pids) as pidfds:
                heal = network.part([CONTROLLER], [1])
                answers, reason = await one.ask_until_lost.call_one(two)
                assert (answers > 1, reason) == (True, "lease")
                await wait_gone(pidfds)
            heal()
            with pytest.raises(HostLost) as caught:
                await two.count.call_one()
            assert caught.value.reason == "lease"
            assert await one.count.call_one() == 1
            while network.connections(0, 1) or network.listening(0):  # noqa: ASYNC110 - the kernel tells nothing
                await trio.sleep(PAUSE)


async def test_host_in_the_place_of_a_lost_one_has_a_session_of_its_own() -> None:
    """H5: at the same address; what was for the old incarnation does not come to the new one."""
    policy = Restart("one_for_one", along="hosts")
    with open_host_network(2) as network, trio.fail_after(HANG_SECONDS):
        job = NetworkJob(network)
        async with (
            job as hosts,
            hosts.spawn_procs({}, supervision=policy) as procs,
            procs.spawn("neighbours", Neighbour) as neighbours,
        ):
            one, two = neighbours.slice(hosts=0), neighbours.slice(hosts=1)
            for calls in range(1, 4):
                assert await one.ask.call_one(two) == calls
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.ask_until_lost.call_one, two)
                await trio.sleep(PAUSE)
                job.kill_agent(1)
            while True:
                try:
                    calls = await one.ask.call_one(two)
                    break
                except HostLost:
                    await trio.sleep(PAUSE)
            assert calls == 1
            assert network.connections(0, 1) == 1
