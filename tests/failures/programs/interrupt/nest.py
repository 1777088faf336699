"""Ctrl-C in the blocks of a usual RL program.

Words: KeyboardInterrupt
"""

import trio

from trimesh import Actor, endpoint, this_host
from trimesh.service import open_pool, open_slots


class Worker(Actor):
    @endpoint
    async def work(self, prompt: str) -> str:
        return prompt


async def main() -> None:
    async with (
        this_host().warm() as host,
        host.spawn_procs({"replicas": 2}, name="generation") as generation,
        open_pool(await generation.spawn("generators", Worker)) as generators,
        open_slots(batch=2, staleness=1),
    ):
        await generators.work("a prompt")
        print("ready", flush=True)
        await trio.sleep_forever()


trio.run(main)
