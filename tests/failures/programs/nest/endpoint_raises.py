"""The blocks of a usual RL program: a replica of a pool raises.

Words: IndexError: string index out of range
"""

import trio

from trimesh import Actor, endpoint, this_host
from trimesh.service import open_pool, open_replay, open_slots


class Worker(Actor):
    @endpoint
    async def work(self, prompt: str) -> str:
        return prompt[100]


async def main() -> None:
    async with (
        this_host().warm() as host,
        host.spawn_procs({"replicas": 2}, name="generation") as generation,
        host.spawn_procs({}, name="judgement") as judgement,
        open_pool(await generation.spawn("generators", Worker)) as generators,
        open_pool(await judgement.spawn("judges", Worker)),
        open_pool(await judgement.spawn("critics", Worker)),
        open_slots(batch=2, staleness=1) as slots,
        open_replay(capacity=10, slots=slots),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(generators.work, "a prompt")


trio.run(main)
