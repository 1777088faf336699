"""Blocks of Trio for tests of what enters and leaves them from asyncio and from threads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import trio


class Block:
    """Notes when it is entered and left, and by which error; can suppress that, or raise another."""

    def __init__(
        self, name: str, notes: list[Any], *, suppresses: bool = False, fails: Exception | None = None
    ) -> None:
        self._name, self._notes, self._suppresses, self._fails = name, notes, suppresses, fails

    async def __aenter__(self) -> str:
        await trio.lowlevel.checkpoint()
        self._task = trio.lowlevel.current_task()
        self._notes.append(f"enter {self._name}")
        return self._name

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert trio.lowlevel.current_task() is self._task
        assert (kind, traceback is None) == (None if error is None else type(error), error is None)
        self._notes.append(f"leave {self._name}" + f" by {type(error).__name__}" * (error is not None))
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        if self._fails is not None:
            raise self._fails
        return self._suppresses


async def nothing() -> int:
    await trio.lowlevel.checkpoint()
    return 7


async def seconds_left() -> float:
    return trio.current_effective_deadline() - trio.current_time()


@asynccontextmanager
async def cancellable() -> AsyncGenerator[trio.CancelScope, None]:
    with trio.CancelScope() as scope:
        yield scope
