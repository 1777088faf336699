"""`map` over a pool: one request for each item, results as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import trio

from trimesh._runtime.tasks import in_trio_taking
from trimesh.actor.options import check_window
from trimesh.config import current

R = TypeVar("R")
Items = Iterable[Any] | AsyncIterable[Any]


class PoolMap(Generic[R]):
    """Results of many requests: `async for index, value in results`."""

    def __init__(self, results: trio.MemoryReceiveChannel[tuple[int, R]]) -> None:
        self._results = results
        self._taken: list[tuple[int, R]] = []

    def __aiter__(self) -> PoolMap[R]:
        """Return itself."""
        return self

    def __anext__(self) -> Awaitable[tuple[int, R]]:
        """Return the next result.

        Raises:
            StopAsyncIteration: There is none.
        """
        return in_trio_taking(self._next, self._taken.append)

    async def _next(self) -> tuple[int, R]:
        if self._taken:
            await trio.lowlevel.checkpoint()
            return self._taken.pop(0)
        return await self._results.__anext__()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, endpoint: Callable[[Any], Awaitable[R]], items: Items, window: int | None
    ) -> AsyncGenerator[PoolMap[R], None]:
        """Make requests while the body runs; leaving it early cancels those that are under way."""
        most = current().map_window if window is None else check_window(window)
        sender, receiver = trio.open_memory_channel[tuple[int, R]](0)
        room = trio.Semaphore(most)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, endpoint, items, room, sender)
            yield cls(receiver)
            nursery.cancel_scope.cancel(reason="the consumer of the map has left")


async def _feed(
    endpoint: Callable[[Any], Awaitable[R]],
    items: Items,
    room: trio.Semaphore,
    sender: trio.MemorySendChannel[tuple[int, R]],
) -> None:
    async def run(index: int, item: Any) -> None:
        await sender.send((index, await endpoint(item)))
        room.release()

    async with trio.open_nursery() as nursery:
        index = 0
        async for item in _each(items):
            await room.acquire()
            nursery.start_soon(run, index, item)
            index += 1
    sender.close()  # not after a failure: the iteration would end as if all results had come


async def _each(items: Items) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
