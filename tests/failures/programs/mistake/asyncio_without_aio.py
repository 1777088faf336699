"""`spawn_procs` of `trimesh` is entered under asyncio.

Words: trimesh.aio
"""

import asyncio

from trimesh import this_host


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        print(procs)


asyncio.run(main())
