"""Ports that wander among processes at random, over slow links, while some die (T2): every channel ends, in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend

from trimesh import Actor, ProcDied, endpoint, open_channel, this_proc
from trimesh._transport.in_memory.transport import Delivery
from trimesh._transport.interface import Lane
from trimesh.ids import ProcId

SEEDS = 20
STEPS = 25


class Weather(Delivery):
    """Every message takes some time of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.worst = self.random.choice([0.0, 0.01, 1.0])

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        del source, target, lane, size
        return self.random.random() * self.worst


class Traveller(Actor):
    """Has some ports of one channel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.ports: list[Any] = []

    @endpoint(concurrency=100)
    async def take(self, port: Any) -> None:
        self.ports.append(port)

    @endpoint(concurrency=100)
    async def pass_on(self, target: Any, *, keep: bool) -> None:
        if self.ports:
            port = self.ports[-1] if keep else self.ports.pop()
            await target.take.call_settled(port)

    @endpoint
    async def send(self, count: int) -> None:
        for _ in range(count):
            if not self.ports:
                break
            await self.ports[-1].send((self.number, self.count + 1))
            self.count += 1  # a send that is cancelled has sent nothing

    @endpoint(concurrency=100)
    async def drop(self) -> None:
        """Let go of the newest port."""
        del self.ports[-1:]

    @endpoint
    async def close(self) -> int:
        """Let go of everything, behind what is being sent; return how much that was."""
        self.ports.clear()
        return self.count


class Collector(Actor):
    """Receives."""

    @endpoint
    async def collect(self, give_to: Any, capacity: int) -> list[Any]:
        """Open a channel, send its port to another channel, return what comes."""
        async with open_channel(capacity=capacity) as (port, receiver):
            await give_to.send(port)
            port.close()
            return [item async for item in receiver]


async def wander(backend: SimBackend, rng: random.Random) -> None:
    items: list[tuple[int, int]] = []
    sent: dict[int, int] = {}
    async with (
        open_channel(capacity=1) as (give_to, ports),
        trio.open_nursery() as nursery,
        backend.procs({"gpus": 3}, grace=60.0) as safe,
        this_proc().spawn("here", Collector) as here,
        safe.slice(gpus=0).spawn("there", Collector) as there,
    ):
        collector = rng.choice([here, there])

        async def collect() -> None:
            items.extend(await collector.collect.call_one(give_to, rng.choice([0, 1, 5])))

        nursery.start_soon(collect)
        port = await ports.receive()
        members = [await safe.slice(gpus=rank).spawn(f"safe{rank}", Traveller, rank) for rank in range(3)]
        try:
            async with backend.procs({"gpus": 2}, grace=60.0) as risky:
                members += [
                    await risky.slice(gpus=rank).spawn(f"risky{rank}", Traveller, 3 + rank) for rank in range(2)
                ]
                for member in rng.sample(members, 3):
                    await member.take.call(port)
                port.close()
                await step_about(rng, members)
                if rng.random() < 0.8:
                    backend.kill(risky, rng.randrange(2))
                    await trio.sleep_forever()
                sent |= await close(members[3:])
        except* ProcDied:
            pass
        await step_about(rng, members[:3])
        sent |= await close(members[:3])
        # What was under way to somebody when it closed has come since.
        await trio.sleep(1_000)
        sent |= await close(members[:3])
    for number in range(5):
        counts = [count for sender, count in items if sender == number]
        assert counts == list(range(1, len(counts) + 1))
        assert len(counts) == sent.get(number, len(counts))


async def step_about(rng: random.Random, members: list[Any]) -> None:
    """Let the members do this and that, all at once."""
    async with trio.open_nursery() as nursery:
        for _ in range(STEPS):
            member, other = rng.choice(members), rng.choice(members)
            match rng.randrange(4):
                case 0:
                    nursery.start_soon(member.send.call_settled, rng.randrange(1, 8))
                case 1:
                    nursery.start_soon(member.drop.call_settled)
                case _:
                    keep = rng.random() < 0.5
                    nursery.start_soon(lambda m=member, o=other, k=keep: m.pass_on.call_settled(o, keep=k))
            if rng.random() < 0.3:
                await trio.sleep(rng.random())
        if rng.random() < 0.5:
            nursery.cancel_scope.cancel()


async def close(members: list[Any]) -> dict[int, int]:
    """Let members give up their ports; return how much each has sent."""
    sent: dict[int, int] = {}
    for member in members:
        count = await member.close.call_one()
        sent[int(member.name[-1]) + (3 if member.name.startswith("risky") else 0)] = count
    return sent


@pytest.mark.seeds(SEEDS)
def test_every_channel_ends_and_no_item_is_lost_or_overtaken(seed: int):
    """T2, S01, S10."""

    async def main() -> None:
        async with backend.open():
            backend.network.delivery = Weather(seed)
            await wander(backend, random.Random(seed))
            await backend.check_clean()

    backend = SimBackend(seed)
    backend.run(main)
