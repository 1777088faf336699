"""A whole loop in simulation: pool, slots and replay buffer under kills, stalls and pauses, as a seed decides."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio

from trimesh import Actor, Backoff, ProcDied, RemoteCancelled, Restart, endpoint
from trimesh.service import Paused, open_pool, open_replay, open_slots
from trimesh.testing import simulate

HEALED: dict[str, Any] = {"supervision": Restart("one_for_one", intensity=1000, period=60, backoff=Backoff(0.01))}
BATCH, STALENESS, VERSIONS, WORKERS = 3, 1, 12, 8


class Generator(Actor):
    def __init__(self) -> None:
        self.version = 0

    @endpoint(concurrency=4)
    async def generate(self, request: int, seconds: float) -> int:
        await trio.sleep(seconds)
        if request % 11 == 3:
            raise ValueError(request)
        return request

    @endpoint
    def pull(self, version: int) -> None:
        self.version = version


class Outcomes:
    """What became of each request, and of each sample."""

    def __init__(self) -> None:
        self.asked = 0
        self.of_requests: dict[int, list[str]] = {}
        self.by_worker: Counter[int] = Counter()
        self.trained: list[int] = []
        self.ages: list[int] = []


async def ask(pool: Any, outcomes: Outcomes, rng: random.Random) -> int | None:
    """Make one request; note its one outcome."""
    request = outcomes.asked
    outcomes.asked += 1
    noted = outcomes.of_requests.setdefault(request, [])
    outcome = "left"
    try:
        with trio.move_on_after(rng.choice([0.3, 30.0])):
            result: int = await pool.options(group=request % 5).generate(request, rng.uniform(0.01, 0.5))
            assert result == request
            outcome = "result"
            return result
    except ValueError:
        outcome = "its error"
    except (ProcDied, Paused, RemoteCancelled) as error:
        outcome = type(error).__name__
    finally:
        noted.append(outcome)
    return None


async def train(pool: Any, generators: Any, slots: Any, buffer: Any, outcomes: Outcomes, rng: random.Random) -> None:
    """Take batches, pause in each way, and go on to the next version."""
    for version in range(1, VERSIONS + 1):
        async with buffer.taking(BATCH) as batch:
            await trio.sleep(rng.uniform(0.0, 0.3))
            outcomes.trained += [number for number, _ in batch]
            outcomes.ages += [version - 1 - begun for _, begun in batch]
        pool.cancel(group=rng.randrange(5))
        async with pool.paused(rng.choice(["keep", "wait", "abort"])):
            while True:
                try:
                    await generators.pull.call(version)
                    break
                except* ProcDied:
                    await trio.sleep(0.05)
        await slots.advance(version=version)


async def disturb(mesh: Any, pool: Any, faults: Any, rng: random.Random) -> None:
    """Kill and stall replicas, one after the other."""
    while True:
        await trio.sleep(rng.uniform(0.2, 1.0))
        index = rng.randrange(3)
        if not pool.statistics().replicas[index].is_up:
            continue
        if rng.random() < 0.5:
            faults.kill(mesh.slice(gpus=index))
        else:
            faults.loop(mesh.slice(gpus=index)).lag(0.5)


@pytest.mark.slow
@simulate(seeds=15, per_host={"gpus": 3}, **HEALED)
async def test_loop_under_kills_stalls_and_pauses(mesh, faults):
    """Y1, Y5, Y7, Y8: one outcome a request, each sample counted once, nothing trained too late, no worker starved."""
    rng = random.Random(random.random())
    outcomes = Outcomes()
    generators = await mesh.spawn("generators", Generator)
    async with (
        open_slots(batch=BATCH, staleness=STALENESS) as slots,
        open_replay(capacity=50, slots=slots) as buffer,
        open_pool(generators, concurrency=2, queue=4) as pool,
    ):

        async def roll(worker: int) -> None:
            while True:
                try:
                    async with slots.lease() as lease:
                        outcomes.by_worker[worker] += 1
                        number = await ask(pool, outcomes, rng)
                        if number is None:
                            raise LookupError("no sample")
                        await buffer.add((number, lease.version), version=lease.version)
                except LookupError:
                    continue

        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for worker in range(WORKERS):
                    nursery.start_soon(roll, worker)
                nursery.start_soon(disturb, mesh, pool, faults, rng)
                await train(pool, generators, slots, buffer, outcomes, rng)
                nursery.cancel_scope.cancel()
        requests, items, places = pool.statistics(), buffer.statistics(), slots.statistics()

    assert all(len(noted) == 1 for noted in outcomes.of_requests.values())
    assert requests.made == outcomes.asked == len(outcomes.of_requests)
    assert requests.made == requests.succeeded + requests.failed + requests.cancelled
    assert (requests.running, requests.queued) == (0, 0)
    assert items.added == items.stored + items.taken + sum(items.evicted.values())
    assert items.added <= requests.succeeded
    assert len(outcomes.trained) == len(set(outcomes.trained)) == items.taken == BATCH * VERSIONS
    assert 0 <= min(outcomes.ages) <= max(outcomes.ages) <= STALENESS
    assert places.begun == places.returned + places.handed_on
    assert places.in_use <= places.capacity
    assert min(outcomes.by_worker[worker] for worker in range(WORKERS)) >= 2
