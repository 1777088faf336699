"""A setting has a value of another kind.

Words: grace must be
"""

import trio

import trimesh


async def main() -> None:
    with trimesh.configured(grace="soon"):
        async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
            print(procs)


trio.run(main)
