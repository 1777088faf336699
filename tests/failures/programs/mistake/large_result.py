"""An endpoint returns a GiB by value.

Words: RDMABuffer
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def weights(self) -> bytes:
        return bytes(2**30)


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.weights.call()


trio.run(main)
