"""Introspection of asyncio tasks: their stacks, their waits, and the Trio tasks that wait for them."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from asyncio import tasks as asyncio_tasks
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, cast

import trio

from trimesh._runtime.tasks import await_chain, hidden_awaits, set_outside_tasks
from trimesh.aio.asyncio_work import AsyncioWork, tasks_of_actor
from trimesh.aio.sites import SpareStandIn, StandIn, wait_for_asyncio
from trimesh.aio.slots import AsyncioSlot


class AsyncioTasks:
    """Asyncio tasks that do the work of Trio tasks, for introspection."""

    def awaited_by(self, task: asyncio.Task[Any]) -> Sequence[asyncio.Task[Any]]:
        """Return the tasks that must all end before `task` continues: it awaits a task, a gather or a task group."""
        future = getattr(task, "_fut_waiter", None)
        if future is None:
            return ()
        if isinstance(future, asyncio.Task) or hasattr(future, "_children"):
            found: Any = [future]
        else:
            found = _group_in(task)
        return [one for part in found for one in _tasks_in(part)]

    def of_actor(self, context: contextvars.Context) -> Sequence[asyncio.Task[Any]]:
        return sorted(context.get(tasks_of_actor) or (), key=lambda one: one.get_name())

    def in_trio(self, task: asyncio.Task[Any]) -> trio.lowlevel.Task | None:
        for frame, _ in await_chain(task):
            if frame is not None and frame.f_code is _PERFORM:
                return cast("trio.lowlevel.Task | None", frame.f_locals["self"].task)
        return None


def _tasks_in(future: Any) -> list[asyncio.Task[Any]]:
    """Return the unended tasks that a future stands for."""
    if isinstance(future, asyncio.Task):
        return [] if future.done() else [future]
    return [one for child in getattr(future, "_children", ()) for one in _tasks_in(child)]


def _group_in(task: asyncio.Task[Any]) -> Sequence[Any]:
    """Return the tasks of a `TaskGroup` that is being left, or those of `asyncio.wait` for all."""
    frame: FrameType | None = None
    for frame, _ in await_chain(task):
        if frame is None:
            continue
        if frame.f_code in _LEAVES_GROUP:
            return tuple(getattr(frame.f_locals["self"], "_tasks", ()))
        if frame.f_code is _WAITS:
            names = frame.f_locals
            is_for_all = names.get("return_when") == asyncio.ALL_COMPLETED and names.get("timeout") is None
            return tuple(names.get("fs", ())) if is_for_all else ()
    return ()


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


_PERFORM: Final = _code_of(SpareStandIn.perform)
_LEAVES_GROUP: Final = frozenset(
    _code_of(method)
    for name in ("__aexit__", "_aexit")
    if (method := getattr(asyncio.TaskGroup, name, None)) is not None
)
_WAITS: Final = _code_of(getattr(asyncio_tasks, "_wait", asyncio.wait))  # `asyncio.wait` awaits `_wait`


def _task_of_work(frame: FrameType) -> Any:
    return frame.f_locals["self"].asyncio_task


def watch_tasks() -> None:
    """Register asyncio tasks with the introspection of Trio tasks."""
    hidden_awaits.update(
        {
            _code_of(StandIn.steps): lambda frame: frame.f_locals.get("coroutine"),
            _code_of(AsyncioSlot.live): lambda frame: getattr(frame.f_locals["self"], "steps_task", None),
            _code_of(wait_for_asyncio): lambda frame: frame.f_locals["wait"].task,
            _code_of(cast("Any", AsyncioWork)._wait): _task_of_work,  # noqa: SLF001 - only its code
        }
    )
    set_outside_tasks(AsyncioTasks())
