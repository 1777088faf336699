"""A setting is misspelt.

Words: grace
"""

import trio

import trimesh


async def main() -> None:
    with trimesh.configured(gracee=1):
        async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
            print(procs)


trio.run(main)
