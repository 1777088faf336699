"""The clean-up of an actor raises as its block is left.

Words: OSError: the log cannot be closed
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from trimesh import Actor, endpoint, this_host


class Writer(Actor):
    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        raise OSError("the log cannot be closed")

    @endpoint
    async def write(self, line: str) -> None:
        print(line)


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        writer = await procs.spawn("writer", Writer)
        await writer.write.call_one("hello")


trio.run(main)
