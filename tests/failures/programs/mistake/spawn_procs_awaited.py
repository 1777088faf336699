"""`spawn_procs` is awaited.

Words: async with
"""

import trio

from trimesh import this_host


async def main() -> None:
    procs = await this_host().spawn_procs({"gpus": 2})
    print(procs)


trio.run(main)
