"""The loop of reinforcement learning as a program of asyncio writes it by hand, over the calls of some library.

All that it needs to run is here, and nothing of what keeps it right when something fails: no death, cancel, deadline
or overload is handled, and no rollout is accounted for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count

from bench.meshes.asyncio_tasks import working
from bench.processes import rates_and_costs
from bench.scale import Samples, Scale
from bench.workloads.loop_sizes import BATCH, STALENESS, WORKERS, rollouts_of


class HandMadeLoop:
    """Workers that hold slots, a queue of samples, and a gate that is shut while weights are updated.

    Args:
        generate: Answers a prompt by one of the generators.
        train: Trains a batch and lets all generators have the weights of the version.
    """

    def __init__(
        self, generate: Callable[[str], Awaitable[object]], train: Callable[[list[object], int], Awaitable[object]]
    ) -> None:
        self._generate = generate
        self._train = train
        self._slots = asyncio.Semaphore(BATCH * (STALENESS + 1))
        self._samples: asyncio.Queue[tuple[int, object]] = asyncio.Queue()
        self._gate = asyncio.Event()
        self._gate.set()
        self._version = 0
        self._numbers = count()
        self.updates: list[float] = []

    async def work(self) -> None:
        """Make samples for ever."""
        while True:
            await self._slots.acquire()
            version = self._version
            await self._gate.wait()
            self._samples.put_nowait((version, await self._generate(f"prompt {next(self._numbers)}")))

    async def steps(self, rollouts: int) -> None:
        """Train so many samples."""
        for _ in range(rollouts // BATCH):
            found = [await self._samples.get() for _ in range(BATCH)]
            batch = [sample for version, sample in found if version >= self._version - STALENESS]
            start = time.perf_counter()
            self._gate.clear()
            await self._train(batch, self._version + 1)
            self._version += 1
            self._gate.set()
            for _ in range(BATCH):
                self._slots.release()
            self.updates.append((time.perf_counter() - start) * 1e3)


async def run_by_hand(
    scale: Scale,
    generate: Callable[[str], Awaitable[object]],
    train: Callable[[list[object], int], Awaitable[object]],
) -> Samples:
    """Run such a loop and time it."""
    loop = HandMadeLoop(generate, train)
    async with working(loop.work, WORKERS):
        rates, costs = await rates_and_costs(scale, loop.steps, rollouts_of(scale))
    return {"loop_rollouts": rates, "loop_cpu": costs, "loop_update": loop.updates}
