"""An endpoint raises from another error.

Words: RuntimeError: batch 7 cannot be loaded
"""

import trio

from trimesh import Actor, endpoint, this_host


class Loader(Actor):
    @endpoint
    async def load(self, number: int) -> bytes:
        try:
            return {}[number]
        except KeyError as error:
            raise RuntimeError(f"batch {number} cannot be loaded") from error


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        loader = await procs.spawn("loader", Loader)
        await loader.load.call_one(7)


trio.run(main)
