"""Eager start of asyncio tasks: most calls end in their first step, and then need no turn of the loop."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio import tasks as asyncio_tasks
from collections.abc import Coroutine, Generator
from typing import Any, Final

TASKS: Final = ("_enter_task", "_leave_task")
"""Functions of asyncio that not every release has."""

_HAS_TASKS: Final = all(hasattr(asyncio_tasks, name) for name in TASKS)


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine whose first step has run, for the task that runs the rest.

    Args:
        coroutine: The coroutine.

    Attributes:
        waits_for: The future that its first step awaits, until the task takes it.
    """

    def __init__(self, coroutine: Any) -> None:
        self.waits_for: asyncio.Future[Any] | None = None
        self._coroutine = coroutine
        self.__name__ = coroutine.__name__
        self.__qualname__ = coroutine.__qualname__

    def send(self, value: Any) -> Any:
        if self.waits_for is None:
            return self._coroutine.send(value)
        future, self.waits_for = self.waits_for, None
        return future

    def throw(self, error: Any, *rest: Any) -> Any:
        """Raise in the coroutine. If the task was cancelled before it took the future, cancel the future instead.

        A future that is done cannot be cancelled: then the cancel is raised where the coroutine awaits it.
        """
        future, self.waits_for = self.waits_for, None
        if future is None or future.done():
            return self._coroutine.throw(error, *rest)
        future.cancel(*error.args)  # the message, by which libraries know their cancels
        return future

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        steps: Generator[Any, Any, None] = self._coroutine.__await__()
        return steps

    # `Task.get_stack` and debuggers look at the frame, and at what it awaits.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


def _start_at_once(
    loop: Any, running: asyncio.Task[Any], coroutine: Any, context: contextvars.Context
) -> asyncio.Task[None]:
    """Start a task as `eager_start` does in Python 3.12."""
    begun = _Begun(coroutine)
    task = asyncio.Task(begun, loop=loop, context=context)
    ready: Any = getattr(loop, "_ready", None) if _HAS_TASKS else None
    if not ready:  # a loop of another kind: it runs the first step in its turn
        return task
    first = ready.pop()
    asyncio_tasks._leave_task(loop, running)
    asyncio_tasks._enter_task(loop, task)
    try:
        begun.waits_for = context.run(coroutine.send, None)
    except StopIteration:
        future: Any = asyncio.Future  # of which a task has this, but under the name of an error
        future.set_result(task, None)
    else:
        ready.append(first)
    finally:
        asyncio_tasks._leave_task(loop, task)
        asyncio_tasks._enter_task(loop, running)
    return task


if sys.version_info >= (3, 12):

    def start_eagerly(
        loop: asyncio.AbstractEventLoop,
        running: asyncio.Task[Any],
        coroutine: Any,
        context: contextvars.Context,
    ) -> asyncio.Task[None]:
        """Start a task and run its first step.

        Args:
            loop: The running loop.
            running: The running task.
            coroutine: The coroutine. It must not raise.
            context: Its context variables.
        """
        del running
        return asyncio.Task(coroutine, loop=loop, context=context, eager_start=True)

else:
    start_eagerly = _start_at_once
