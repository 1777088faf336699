"""The blocks of a usual RL program: their body raises.

Words: a reward must be finite
"""

import trio

from trimesh import Actor, endpoint, this_host
from trimesh.service import open_pool, open_replay, open_slots


class Worker(Actor):
    @endpoint
    async def work(self, prompt: str) -> str:
        return prompt


async def main() -> None:
    async with (
        this_host().warm() as host,
        host.spawn_procs({"replicas": 2}, name="generation") as generation,
        host.spawn_procs({}, name="judgement") as judgement,
        open_pool(await generation.spawn("generators", Worker)) as generators,
        open_pool(await judgement.spawn("judges", Worker)) as judges,
        open_pool(await judgement.spawn("critics", Worker)),
        open_slots(batch=2, staleness=1) as slots,
        open_replay(capacity=10, slots=slots),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(trio.sleep_forever)
        await generators.work("a prompt")
        await judges.work("a text")
        raise ValueError("a reward must be finite")


trio.run(main)
