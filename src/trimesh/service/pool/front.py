"""How other processes use a pool: an actor in the process of its owner, to which their calls go."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.service.pool.call_options import CallOptions, PauseMode
from trimesh.service.pool.engine import PoolEngine

_engines: WeakValueDictionary[int, PoolEngine] = WeakValueDictionary()
_numbers = count()


def number_of(engine: PoolEngine) -> int:
    """Return the number by which the actor beside an engine finds it: arguments of actors are copied."""
    number = next(_numbers)
    _engines[number] = engine
    return number


class PoolFront(Actor):
    """A pool, for other processes."""

    def __init__(self, number: int) -> None:
        self.engine = _engines[number]

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="calls")
    async def run(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> tuple[Any, int]:
        """Run an endpoint on one replica; return its result, and how often the session has moved."""
        result = await self.engine.run(name, args, kwargs, options)
        return result, self.engine.moves_of(options.session)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="pauses")
    async def hold_pause(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        """Pause until the consumer leaves, or dies."""
        async with self.engine.paused(mode):
            yield
            await trio.sleep_forever()
