"""The tasks of the runtime in one process. None of them may fail: one that does has met a bug of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trimesh._runtime.tasks.cancelled import split_cancelled


class Tasks:
    """A nursery whose first failure is told while it is one, before all that depends on it comes apart.

    Args:
        on_failure: Told of what a task has raised, before its nursery is.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], nursery: trio.Nursery) -> None:
        self._on_failure = on_failure
        self._nursery = nursery

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run a task until the process ends."""
        self._nursery.start_soon(self._run, function, args, name=function)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            failure = split_cancelled(error)[1]
            if failure is not None:
                self._on_failure(failure)
            raise
