"""A keyword of `spawn_procs` is misspelt.

Words: is it supervision?
"""

import trio

from trimesh import Isolate, this_host


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}, supervison=Isolate()) as procs:
        print(procs)


trio.run(main)
