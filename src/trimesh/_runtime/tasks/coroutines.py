"""Coroutines: awaited in another context, and traced through the objects that they await.

Observers trace them, some from a signal handler: `await_chain` and its callees take no lock, await nothing and change
nothing.
"""

from __future__ import annotations

import contextvars
import gc
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import trio

    from trimesh.aio.awaiting import AsyncioTasks

T = TypeVar("T")


@types.coroutine
def run_in_context(context: contextvars.Context, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coroutine` with every step of it in `context`.

    A task has one context for its life. A slot runs many messages; context changes of one must not reach the next.
    """
    try:
        try:
            trap = context.run(coroutine.send, None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        return (yield from _rest(context, coroutine, trap))
    finally:
        del coroutine  # as below


@types.coroutine
def go_on_in_context(
    context: contextvars.Context, coroutine: Coroutine[Any, Any, T], trap: Any
) -> Generator[Any, Any, T]:
    """Await the rest of a coroutine whose first step, made in `context`, has yielded `trap`."""
    try:
        return (yield from _rest(context, coroutine, trap))
    finally:
        del coroutine  # as below


def _rest(context: contextvars.Context, coroutine: Coroutine[Any, Any, T], trap: Any) -> Generator[Any, Any, T]:
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                value = yield trap
                step = coroutine.send
            except BaseException as error:  # noqa: BLE001 - raised inside of the coroutine
                value = error
                step = coroutine.throw
            try:
                trap = context.run(step, value)
            except StopIteration as stop:
                result: T = stop.value
                return result
    finally:
        # This frame is in the traceback of the exception. A reference from here to the exception would be a cycle, and
        # all frames would live until the collector runs, with the locals of endpoints: arrays, ports.
        del coroutine, step, value


REST_CODE: Final = _rest.__code__
"""Code of a task that awaits a coroutine in this way; the frame's local `coroutine` is the awaited one."""


# ---- chains of awaited objects ---------------------------------------------------------------------------------------

_HIDING: Final = ("async_generator_asend", "async_generator_athrow")
"""Steps of an async generator, which do not reference it."""

hidden_awaits: Final[dict[CodeType, Callable[[FrameType], Any]]] = {
    REST_CODE: lambda frame: frame.f_locals.get("coroutine")
}
"""For code whose frame hides what it awaits: returns that coroutine, or task of another loop, or None."""


class _Registry:
    outside: AsyncioTasks | None = None


def set_outside_tasks(outside: AsyncioTasks) -> None:
    """Make the tasks of another loop visible to observers."""
    _Registry.outside = outside


def find_outside_tasks() -> AsyncioTasks | None:
    """Return the tasks of another loop; None in a process without one."""
    return _Registry.outside


def await_chain(awaitable: Any) -> Iterator[tuple[FrameType | None, Any]]:
    """Yield the frames of a coroutine and of the objects that it awaits, outermost first, each with its task.

    The task is that of another loop, or None.
    """
    task: Any = None
    while awaitable is not None:
        if hasattr(awaitable, "get_coro"):
            task = awaitable
        frame, awaitable = _step(awaitable)
        yield frame, task


def _step(awaitable: Any) -> tuple[FrameType | None, Any]:
    """Return the frame of an awaited object, and the object that it awaits."""
    for frame_name, awaited_name in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
        if hasattr(awaitable, frame_name):
            frame: FrameType | None = getattr(awaitable, frame_name)
            find = None if frame is None else hidden_awaits.get(frame.f_code)
            if find is not None and frame is not None:
                return frame, find(frame)
            return frame, getattr(awaitable, awaited_name)
    if hasattr(awaitable, "get_coro"):
        return None, awaitable.get_coro()
    if type(awaitable).__name__ in _HIDING:
        return None, next((one for one in gc.get_referents(awaitable) if hasattr(one, "ag_frame")), None)
    return None, None


def outside_tasks_in(task: trio.lowlevel.Task) -> list[Any]:
    """Return the tasks of another loop that a task of Trio awaits, directly or through others; outermost first."""
    outside = _Registry.outside
    if outside is None:
        return []
    found: dict[Any, None] = {}
    todo = [last_task(task)]
    while todo:
        one = todo.pop()
        if one is not None and one not in found:
            found[one] = None
            todo += outside.awaited_by(one)
    return list(found)


def last_task(task: trio.lowlevel.Task) -> Any:
    """Return the innermost task of another loop that a task of Trio awaits; None without one."""
    found: Any = None
    for _, one in await_chain(task.coro):
        found = one if one is not None else found
    return found
