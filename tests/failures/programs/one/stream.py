"""A generator endpoint raises after some items.

Words: ValueError: the shard ends in the middle of a record
"""

from collections.abc import AsyncGenerator

import trio

from trimesh import Actor, endpoint, this_host


class Reader(Actor):
    @endpoint
    async def read(self) -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("the shard ends in the middle of a record")


async def main() -> None:
    async with this_host().spawn_procs({"readers": 2}) as procs:
        readers = await procs.spawn("readers", Reader)
        async with readers.slice(readers=0).read.stream() as items:
            async for _, item in items:
                print(item)


trio.run(main)
