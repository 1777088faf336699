"""Hosts that suffer for long: resets, stops, cuts; then some are lost, and all are had anew, again and again.

    python -m tests.jobs.network.chaos --minutes 60 --seed 0          # also: make soak WORKLOAD=hosts

Messages go between eight processes on four hosts all the time. Beside EX-1 and EX-2 it holds:

    CH-1 What a host can survive loses, doubles and reorders nothing.
    CH-2 When hosts are lost, the others lose nothing; nothing comes of a lost host after it was given up.
    CH-3 What is cut off ends by itself, before the cut is healed.
    CH-4 After each block the descriptors, threads and children of this process are those that it had before.
    CH-5 Its memory does not grow with blocks: by MEMORY_BYTES at most, once what is made once is there.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import attrs
import trio
from tests.jobs.network.exchange import Exchange, exchange_on
from tests.stress.soak.gauges import children, held, resident_bytes

from trimesh import Isolate, limits
from trimesh.testing import HostNetwork, NetworkJob, open_host_network

HOSTS = 4
ROUNDS = 4
"""That the hosts survive, before some are lost."""

COUNT = 40
"""Messages from each process to each other one, in a round."""

PHASE_SECONDS = 60.0
"""A round, or the loss of hosts, that has not ended by then never will."""

SETTLED = 5
"""Blocks after which all that is made once has been made, and the allocator has the pages that it keeps."""

MEMORY_BYTES = 16 << 20
"""Of pages that an allocator holds or not, by chance: a leak of 100 KB a block is found after 160 of them."""


@attrs.define(eq=False)
class Suffered:
    """What has happened.

    Attributes:
        blocks: Of jobs.
        messages: That were sent, and have come once.
        faults: How often each.
        resident: Memory of this process that was in RAM after each block, in bytes.
    """

    blocks: int = 0
    messages: int = 0
    faults: Counter[str] = attrs.field(factory=Counter[str])
    resident: list[int] = attrs.field(factory=list[int])

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        happened = f"{self.blocks} blocks, {self.messages} messages, {sum(self.faults.values())} faults ({faults})"
        first, last = (self.resident[at] / (1 << 20) for at in (min(SETTLED, len(self.resident)) - 1, -1))
        return f"{happened}; memory {first:.1f} MiB after block {min(SETTLED, self.blocks)}, {last:.1f} MiB at the end"


async def suffer(seconds: float, blocks: int, seed: int) -> Suffered:
    """Enter blocks of hosts that suffer, at least so many and for so long; return what has happened."""
    suffered, before = Suffered(), Counts.now()
    ends = trio.current_time() + seconds
    while suffered.blocks < blocks or trio.current_time() < ends:
        chance = random.Random(f"{seed} {suffered.blocks}")
        await block(chance, suffered)
        suffered.blocks += 1
        now = Counts.now()
        if suffered.blocks == 1:
            before = now  # what is made once, with the first block, stays
        assert now == before, f"CH-4: {now} after block {suffered.blocks} of seed {seed}, {before} before"
        gc.collect()
        suffered.resident.append(resident_bytes(os.getpid()))
        grown = suffered.resident[-1] - suffered.resident[:SETTLED][-1]
        assert grown <= MEMORY_BYTES, f"CH-5: {grown >> 20} MiB more after block {suffered.blocks} of seed {seed}"
    return suffered


@attrs.frozen
class Counts:
    """What this process has."""

    fds: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Counts:
        """Count it, but for the idle threads that Trio keeps for a while."""
        own = held(os.getpid())
        kept = sum(thread.name.startswith("Trio thread") for thread in threading.enumerate())
        return cls(own.fds, own.threads - kept, len(children(os.getpid())))


async def block(chance: random.Random, suffered: Suffered) -> None:
    """Enter a job on four hosts, let them suffer, lose some."""
    with open_host_network(HOSTS) as network:
        job = NetworkJob(network)
        async with job as hosts, exchange_on(hosts, {"gpus": 2}, Isolate()) as exchange:
            for _ in range(ROUNDS):
                with trio.fail_after(PHASE_SECONDS):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(exchange.round, COUNT)
                        await survive(network, job, chance, suffered)
            await exchange.check()
            with trio.fail_after(PHASE_SECONDS):
                await lose(network, job, exchange, chance, suffered)
            suffered.messages += exchange.total


async def survive(network: HostNetwork, job: NetworkJob, chance: random.Random, suffered: Suffered) -> None:
    """Make something happen that a session survives (CH-1)."""
    victims = chance.sample(range(HOSTS), chance.choice([1, 1, 2]))
    kind = chance.choice(["reset", "stop", "cut", "cut to", "cut from", "loss", "slow"])
    suffered.faults[kind] += 1
    await trio.sleep(chance.uniform(0, 0.02))
    pause = chance.uniform(0, limits.AGENT_LEASE_SECONDS / 2)
    match kind:
        case "reset":
            network.reset(victims)
        case "stop":
            for victim in victims:
                job.kill_agent(victim, signal.SIGSTOP)
            await trio.sleep(pause)
            network.reset(victims)
            for victim in victims:
                job.kill_agent(victim, signal.SIGCONT)
        case "loss":
            heal = network.lose_packets(victims, 0.05)
            await trio.sleep(pause)
            heal()
        case "slow":
            heal = network.limit(victims, 10_000_000)
            await trio.sleep(pause)
            heal()
        case _:
            heal = network.cut(victims, {"cut": "both", "cut to": "a_to_b", "cut from": "b_to_a"}[kind])
            await trio.sleep(pause)
            heal()


async def lose(
    network: HostNetwork, job: NetworkJob, exchange: Exchange, chance: random.Random, suffered: Suffered
) -> None:
    """Lose one or two hosts while messages are under way (CH-2, CH-3)."""
    victims = chance.sample(range(HOSTS), chance.choice([1, 2]))
    kind = chance.choice(["kill", "partition"])
    suffered.faults[kind] += 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.last_round, COUNT, victims)
        await trio.sleep(chance.uniform(0, 0.02))
        if kind == "kill":
            for victim in victims:
                job.kill_agent(victim)
        else:
            heal = network.cut(victims)
            for victim in victims:
                await job.agents[victim].ended()
    before = await exchange.reports()
    if kind == "partition":
        heal()
    await exchange.check()
    await exchange.round(COUNT)
    await exchange.check()
    after = await exchange.reports()
    for own, received in after.items():
        for other, count in received.items():
            stays = before[own].get(other, 0)
            assert other in exchange.members or count == stays, f"CH-2: {own} got {count - stays} of lost {other}"
    for victim in victims:
        code = job.agents[victim].exit_code
        assert code == (-signal.SIGKILL if kind == "kill" else 0), f"CH-3: agent {victim} has ended with {code}"


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.jobs.network.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    suffered = trio.run(suffer, 60 * options.minutes, 1, options.seed)
    seconds = time.monotonic() - began
    print(f"{suffered}; descriptors, threads and children as after the first; {seconds:.0f} s; every rule held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
