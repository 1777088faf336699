"""`spawn_procs` is entered by `with`.

Words: async with
"""

import trio

from trimesh import this_host


async def main() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        print(procs)


trio.run(main)
