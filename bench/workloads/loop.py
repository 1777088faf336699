"""The loop of reinforcement learning with a no-op model: rollouts a second, and how long an update holds them.

64 workers lease slots (staleness 1), ask one of 4 generators, and store the answer; the trainer gets batches of 64, and
after each step the generators have its weights, 1 KiB, before work begins with them. trimesh's side is made of its
blocks: a pool, slots, a replay buffer, a publication. Those of Ray and Monarch are the same loop by hand
(`loop_by_hand`), without what the blocks do when something fails: asyncio's queue and semaphore in the program, the
generators in turn. Weights go as each library has it for weights: an object of Ray's store, an `RDMABuffer` of Monarch.
"""

from __future__ import annotations

import time
from itertools import count, cycle
from typing import Any

from bench.processes import rates_and_costs
from bench.scale import Metric, Samples, Scale
from bench.workloads.loop_sizes import BATCH, GENERATORS, STALENESS, WEIGHTS, WORKERS, rollouts_of

METRICS = [
    Metric("loop_rollouts", "rollouts of the whole loop, no-op model", "1000/s", is_rate=True),
    Metric("loop_cpu", "of each: processor time of all processes", "us"),
    Metric("loop_update", "of each batch: a step, weights published and pulled, slots freed", "ms"),
]

LACKS = {"xoscar": "no framework of reinforcement learning is built on it"}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.meshes import trimesh_mesh

    return await run_blocks(scale, trimesh_mesh)


async def run_blocks(scale: Scale, tasks: Any) -> Samples:
    """Run the loop of trimesh's blocks in a Trio or an asyncio program.

    Args:
        scale: Sizes.
        tasks: The module that has `working` for the program: `trimesh_mesh` or `asyncio_tasks` of `bench.meshes`.
    """
    from bench.workloads.loop_actors import NoOpGenerator, NoOpTrainer
    from trimesh import this_host
    from trimesh.service import open_pool, open_replay, open_slots

    updates: list[float] = []
    async with this_host().spawn_procs({"procs": GENERATORS + 1}) as procs:
        generators = await procs.slice(procs=slice(0, GENERATORS)).spawn("generators", NoOpGenerator)
        trainer = await procs.slice(procs=GENERATORS).spawn("trainer", NoOpTrainer)
        weights = await trainer.publication.call_one()
        async with (
            open_pool(generators, concurrency=32) as pool,
            open_slots(batch=BATCH, staleness=STALENESS) as slots,
            open_replay(capacity=1000, slots=slots) as buffer,
        ):
            numbers = count()

            async def work() -> None:
                while True:
                    async with slots.lease() as lease:
                        sample = await pool.generate(f"prompt {next(numbers)}")
                        await buffer.add(sample, version=lease.version)

            async def steps(rollouts: int) -> None:
                for _ in range(rollouts // BATCH):
                    async with buffer.taking(BATCH) as batch:
                        start = time.perf_counter()
                        async with pool.paused("keep"):
                            version = await trainer.step.call_one(batch)
                            await generators.pull.call(weights)
                        await slots.advance(version=version)
                    updates.append((time.perf_counter() - start) * 1e3)

            async with tasks.working(work, WORKERS):
                rates, costs = await rates_and_costs(scale, steps, rollouts_of(scale))
    return {"loop_rollouts": rates, "loop_cpu": costs, "loop_update": updates}


async def ray_side(scale: Scale) -> Samples:
    import asyncio

    import ray

    from bench.workloads.loop_by_hand import run_by_hand

    ray.init(num_cpus=GENERATORS + 1, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0, max_concurrency=32)
    class Generator:
        async def generate(self, prompt: str) -> str:
            return prompt

        async def pull(self, weights: bytes) -> None:
            self.weights = weights

    @ray.remote(num_cpus=0)
    class Trainer:
        def step(self, batch: list[object], version: int) -> bytes:
            del batch, version
            return b"\1" * WEIGHTS

    generators, trainer = [Generator.remote() for _ in range(GENERATORS)], Trainer.remote()
    turn = cycle(generators)

    async def train(batch: list[object], version: int) -> None:
        weights = trainer.step.remote(batch, version)
        await asyncio.gather(*[generator.pull.remote(weights) for generator in generators])

    async def generate(prompt: str) -> object:
        return await next(turn).generate.remote(prompt)

    found = await run_by_hand(scale, generate, train)
    ray.shutdown()
    return found


async def monarch_side(scale: Scale) -> Samples:
    import torch
    from monarch.actor import Actor, endpoint, this_host
    from monarch.rdma import RDMABuffer

    from bench.workloads.loop_by_hand import run_by_hand

    class Generator(Actor):
        def __init__(self) -> None:
            self.weights = torch.zeros(WEIGHTS, dtype=torch.uint8)

        @endpoint
        async def generate(self, prompt: str) -> str:
            return prompt

        @endpoint
        async def pull(self, weights: RDMABuffer) -> None:
            await weights.read_into(self.weights)

    class Trainer(Actor):
        def __init__(self) -> None:
            self.weights = torch.ones(WEIGHTS, dtype=torch.uint8)
            self.buffer = RDMABuffer(self.weights)

        @endpoint
        async def step(self, batch: list[object], version: int) -> RDMABuffer:
            del batch, version
            return self.buffer

    host: Any = this_host()
    some, one = host.spawn_procs(per_host={"gpus": GENERATORS}), host.spawn_procs(per_host={"gpus": 1})
    try:
        generators, trainer = some.spawn("generators", Generator), one.spawn("trainer", Trainer)
        turn = cycle([generators.slice(gpus=index) for index in range(GENERATORS)])

        async def train(batch: list[object], version: int) -> None:
            weights = await trainer.step.call_one(batch, version)
            await generators.pull.call(weights)

        async def generate(prompt: str) -> object:
            return await next(turn).generate.call_one(prompt)

        return await run_by_hand(scale, generate, train)
    finally:
        await some.stop()
        await one.stop()
