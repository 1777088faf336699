"""What Monarch's getting-started shows, step by step: processes, actors, slices, references, errors, supervision.

Run it: python examples/monarch/getting_started.py
"""

from __future__ import annotations

import trio

from trimesh import Actor, Restart, Restarted, coords, current_point, current_rank, endpoint, leaves, this_host


class Trainer(Actor):
    """Trains, one would say."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.steps = 0

    @endpoint
    async def step(self, batch: int) -> str:
        """Take a step."""
        self.steps += 1
        return f"rank {current_rank()} of {dict(current_point().extent)}, batch {batch}"

    @endpoint
    async def count(self) -> int:
        """Return how many steps were taken."""
        return self.steps

    @endpoint
    async def fail(self) -> None:
        """Raise on rank 2."""
        if current_rank() == 2:
            raise ValueError("a batch of rank 2 is broken")


class Generator(Actor):
    """Talks to a trainer, whose handle it was given."""

    def __init__(self, trainers: Trainer) -> None:
        self.trainers = trainers

    @endpoint
    async def ask(self) -> int:
        """Return the steps of all trainers."""
        return sum(await self.trainers.count.call())


async def main() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer, learning_rate=0.1)
        for point, answer in (await trainers.step.call(1)).items():
            print(f"{dict(point)}: {answer}")

        first_gpus = trainers.slice(gpus=0)
        await first_gpus.step.call(2)
        await trainers.step.broadcast(3)  # nothing comes back; messages to one actor keep their order

        generators = await procs.slice(hosts=0).spawn("generators", Generator, trainers)
        print("steps, asked from another process:", (await generators.ask.call())[0])

        try:
            await trainers.fail.call()
        except* ValueError as group:  # the original exception, with where it came from
            for error in leaves(group):
                print(f"{error}, at {coords(error)}")

    # A process that dies is started again, with its actors; handles follow. The log says so.
    policy = Restart(along="gpus")
    async with this_host().spawn_procs({"gpus": 2}, supervision=policy) as procs:
        trainers = await procs.spawn("trainers", Trainer, learning_rate=0.1)
        async with procs.events() as events:
            await procs.kill([{"gpus": 1}])
            async for event in events:
                if isinstance(event, Restarted):
                    break
        print("steps after a death and a restart:", list(await trainers.count.call()))


if __name__ == "__main__":
    trio.run(main)
