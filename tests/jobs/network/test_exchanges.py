"""Messages between processes of several hosts whose network is bad: each comes once, in order, or there is an error."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from tests.jobs.network.exchange import Exchange, exchange_on
from tests.jobs.network.observing import needs_network
from tests.patience import HANG_SECONDS

from trimesh import HostLost, MeshErrorGroup, leaves, limits

pytest.importorskip("cryptography")

from trimesh._transport.relay import Statistics
from trimesh.testing import HostNetwork, NetworkJob, open_host_network

pytestmark = needs_network

PAIRS = 8 * 7
LONG_SECONDS = 600.0


@attrs.frozen
class Length:
    """How long a run is.

    Attributes:
        messages: At least.
        rounds: In which they are sent; each is disturbed.
    """

    messages: int
    rounds: int

    @property
    def each(self) -> int:
        """Messages from each process to each other one, in a round."""
        return self.messages // PAIRS // self.rounds + 1

    def moments(self, *, has_more: Callable[[], bool]) -> Iterator[tuple[int, random.Random]]:
        """Yield the number and the chance of each round, and of more rounds for as long as `has_more` says so."""
        for number in itertools.count():
            if number >= self.rounds and not has_more():
                return
            yield number, random.Random(f"{self.messages} {number}")


def lengths(short: Length, long: Length) -> Any:
    """Run a test in a short form always, in a long one as `stress`."""
    marks = [pytest.mark.stress, pytest.mark.timeout(LONG_SECONDS)]
    values = [pytest.param(short, id="short"), pytest.param(long, id="long", marks=marks)]
    return pytest.mark.parametrize("length", values)


@attrs.frozen
class Run:
    """An exchange on three hosts."""

    network: HostNetwork
    job: NetworkJob
    exchange: Exchange
    hosts: Any

    def counted(self) -> list[Statistics]:
        """Return what the sessions with the hosts have counted."""
        return [place.host._pipe.session.statistics() for place in self.hosts._owned.host.hosts]


@asynccontextmanager
async def exchanging(length: Length, direct: str = "") -> AsyncGenerator[Run, None]:
    seconds = LONG_SECONDS if length.messages > 100_000 else HANG_SECONDS
    with open_host_network(3) as network, trio.fail_after(seconds):
        job = NetworkJob(network, direct=direct)
        async with job as hosts, exchange_on(hosts, {"gpus": 3}) as exchange:
            yield Run(network, job, exchange, hosts)
            await exchange.check()
            assert exchange.total >= length.messages


@lengths(Length(20_000, 10), Length(1_000_000, 50))
async def test_resets_and_stopped_agents_lose_and_double_nothing(length: Length) -> None:
    """H3: eight processes on three hosts; connections are reset and agents stopped at any moment, also at one that is
    bad for a message on its way."""
    broken = 0
    # By way of the program, whose sessions say what they have sent again; `test_direct.py` resets those of agents.
    async with exchanging(length, direct="off") as run:
        run.network.limit([0, 1, 2], 40_000_000)  # so that there is something on its way, which a reset loses
        for number, chance in length.moments(has_more=lambda: not any(one.resent for one in run.counted())):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run.exchange.round, length.each)
                await trio.sleep(chance.uniform(0, length.each / 3000))  # the moment is what is varied
                host = chance.randrange(3)
                is_stopped = number % 5 in (1, 4)
                if is_stopped:
                    run.job.kill_agent(host, signal.SIGSTOP)
                    await trio.sleep(chance.uniform(0, limits.AGENT_LEASE_SECONDS / 2))
                broken += run.network.reset([host])
                if is_stopped:
                    run.job.kill_agent(host, signal.SIGCONT)
        counted = run.counted()
    assert broken >= length.rounds
    assert sum(one.connections for one in counted) >= 3 + length.rounds
    assert sum(one.resent for one in counted) > 0


async def flap(network: HostNetwork, chance: random.Random) -> None:
    """Cut all connections of a host, in one direction or both, and heal them, again and again."""
    while True:
        heal = network.cut([chance.randrange(3)], chance.choice(["both", "a_to_b", "b_to_a"]))
        try:
            await trio.sleep(chance.uniform(0, limits.AGENT_LEASE_SECONDS / 4))
        finally:
            heal()
        await trio.sleep(chance.uniform(0.5, 1.0))  # in which an agent dials again


def lossy(network: HostNetwork) -> None:
    network.lose_packets([0, 1, 2], 0.05)


def slow(network: HostNetwork) -> None:
    network.limit([-1, 0, 1, 2], 10_000_000)


@lengths(Length(5_000, 3), Length(100_000, 10))
@pytest.mark.parametrize("worsen", [lossy, slow])
async def test_bad_network_loses_and_doubles_nothing(length: Length, worsen: Callable[[HostNetwork], None]) -> None:
    """H3: one packet in twenty is lost; or no cable carries more than 10 Mbit/s."""
    async with exchanging(length) as run:
        worsen(run.network)
        for _ in range(length.rounds):
            await run.exchange.round(length.each)
        if worsen is lossy:
            assert run.network.dropped() > 0


@lengths(Length(5_000, 3), Length(100_000, 20))
async def test_flapping_network_loses_and_doubles_nothing(length: Length) -> None:
    """H3: cuts in one direction or both that are shorter than the leases, at any moment."""
    async with exchanging(length) as run, trio.open_nursery() as nursery:
        nursery.start_soon(flap, run.network, random.Random(length.messages))
        for _ in range(length.rounds):
            await run.exchange.round(length.each)
            await trio.sleep(0.5)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("direction", ["a_to_b", "b_to_a"])
async def test_lasting_cut_of_one_direction_is_one_clean_error(direction: Any) -> None:
    """H4: whichever side hears nothing, the block raises the loss of the host, and nothing else."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught, open_host_network(3) as network:
        async with NetworkJob(network) as hosts, exchange_on(hosts, {"gpus": 3}) as exchange:
            network.cut([1], direction)
            while True:
                await exchange.round(20)
    assert [(type(leaf), dict(leaf.point)) for leaf in leaves(caught.value)] == [(HostLost, {"hosts": 1})]
