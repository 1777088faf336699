"""A request of a pool raises.

Words: ValueError: a prompt needs at least one word
"""

import trio

from trimesh import Actor, endpoint, this_host
from trimesh.service import open_pool


class Generator(Actor):
    @endpoint
    async def generate(self, prompt: str) -> str:
        if not prompt:
            raise ValueError("a prompt needs at least one word")
        return prompt


async def main() -> None:
    async with this_host().spawn_procs({"replicas": 2}) as procs:
        generators = await procs.spawn("generators", Generator)
        async with open_pool(generators) as pool:
            await pool.generate("")


trio.run(main)
