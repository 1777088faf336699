"""A background task of an actor raises; no caller waits for it.

Words: ConnectionError: the feed is closed
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from trimesh import Actor, this_host


class Reader(Actor):
    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.follow)
            yield
            nursery.cancel_scope.cancel()

    async def follow(self) -> None:
        await trio.sleep(0.1)
        raise ConnectionError("the feed is closed")


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        await procs.spawn("reader", Reader)
        await trio.sleep_forever()


trio.run(main)
