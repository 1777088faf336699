"""The body of a block raises, and so does the clean-up of an actor.

Words: OSError: the log cannot be closed
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from trimesh import Actor, this_host


class Writer(Actor):
    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            raise OSError("the log cannot be closed")


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        await procs.spawn("writer", Writer)
        raise ValueError("a step must be positive")


trio.run(main)
