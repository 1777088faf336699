"""`rolling`: one replica after the other is taken out of service, handed to the body, and put back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from trimesh._runtime.tasks import in_trio_taking
from trimesh.plain_numbers import plain_whole
from trimesh.service.dispatch.replica import Replica
from trimesh.service.pool.engine import PoolEngine

A = TypeVar("A")


class Rolling(Generic[A]):
    """The replicas, one at a time: `async for replica in replicas`.

    Args:
        engine: The pool.
        at_most: Replicas that may be out of service at once.
    """

    def __init__(self, engine: PoolEngine, at_most: int) -> None:
        self._engine = engine
        self._at_most = at_most
        self._seen: set[int] = set()
        self._out: list[int] = []
        self._given: int | None = None

    def __aiter__(self) -> Rolling[A]:
        """Return itself."""
        return self

    def __anext__(self) -> Awaitable[A]:
        """Put the replica before this one back, and return the next, once it runs no more requests.

        Raises:
            StopAsyncIteration: All have had their turn.
        """
        return in_trio_taking(self._next, self._put_back)

    async def _next(self) -> A:
        if self._given is not None:
            self._let_in(self._given)
            self._given = None
        while True:
            self._take_out()
            if not self._out:
                raise StopAsyncIteration
            replica = self._engine.dispatcher.replicas[self._out[0]]
            await self._engine.wait_until(partial(_is_idle_or_gone, replica))
            if replica.is_member:
                self._given = replica.index
                found: Any = self._engine.views[replica.index]
                return found  # type: ignore[no-any-return]
            self._let_in(replica.index)  # it has left the pool meanwhile

    def _take_out(self) -> None:
        """Take replicas that have not had their turn out of service, as many as may be."""
        for one in self._engine.dispatcher.replicas:
            if len(self._out) < self._at_most and one.is_member and one.index not in self._seen:
                self._seen.add(one.index)
                self._out.append(one.index)
                self._engine.dispatcher.set_updating(one.index, is_updating=True)
        self._engine.pump()

    def _put_back(self, _: A) -> None:
        self._given = None  # it is the first of those that are out: the next step gives it again

    def _let_in(self, index: int) -> None:
        self._out.remove(index)
        self._engine.dispatcher.set_updating(index, is_updating=False)
        self._engine.pump()

    @classmethod
    @asynccontextmanager
    async def open(cls, engine: PoolEngine, at_most: int) -> AsyncGenerator[Rolling[A], None]:
        """Put all back when the body is left."""
        serving = sum(one.is_member for one in engine.dispatcher.replicas)
        at_most = plain_whole(at_most)
        if not 1 <= at_most <= max(1, serving - 1):
            raise ValueError(
                f"at_most must be at least 1 and leave one of the {serving} replicas in service, got {at_most!r}"
            )
        rolling = cls(engine, at_most)
        try:
            yield rolling
        finally:
            for index in [*rolling._out]:
                rolling._let_in(index)


def _is_idle_or_gone(replica: Replica) -> bool:
    return not replica.running or not replica.is_member
