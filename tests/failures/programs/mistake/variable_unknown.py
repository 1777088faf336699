"""A variable of the environment is misspelt.

Words: TRIMESH_GRACE
"""

import os

import trio

os.environ["TRIMESH_GRACEE"] = "1"

import trimesh


async def main() -> None:
    async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
        print(procs)


trio.run(main)
