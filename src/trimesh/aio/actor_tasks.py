"""The tasks of asyncio that the code of an actor starts, and how the end of their loop is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, cast

from trimesh.errors import TrimeshInternalError

Tasks = set["asyncio.Task[Any]"]

tasks_of_actor: ContextVar[Tasks | None] = ContextVar("trimesh_aio_tasks", default=None)
"""The tasks of asyncio that the code of the running actor has started, and that have not ended."""


def start_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    """Start a task as asyncio does, and note to which actor it belongs."""
    task = asyncio.Task(cast("Coroutine[Any, Any, Any]", coroutine), loop=loop, **options)
    context = options.get("context")
    tasks = tasks_of_actor.get() if context is None else context.get(tasks_of_actor)
    if tasks is not None and not task.done():  # an eager one may have ended already
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


def broken_loop(error: BaseException | None) -> TrimeshInternalError:
    """Return the error of those who need a loop that has ended by itself."""
    broken = TrimeshInternalError("the asyncio loop of this process has ended while actors were using it")
    broken.__cause__ = error
    return broken
