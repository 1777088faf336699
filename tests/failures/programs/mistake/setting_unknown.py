"""A setting that is like no other.

Words: there is no setting 'zzz'
"""

import trio

import trimesh


async def main() -> None:
    with trimesh.configured(zzz=1):
        async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
            print(procs)


trio.run(main)
