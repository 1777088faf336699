"""The body of a block raises that publishes actors to other programs.

Words: ValueError: a step must be positive
"""

import trio

from trimesh import Actor, endpoint, this_host
from trimesh.programs import publish_as


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        pass


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        trainer = await procs.spawn("trainer", Trainer)
        async with publish_as("failing-trainer", trainer):
            raise ValueError("a step must be positive")


trio.run(main)
