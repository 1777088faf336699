"""Started calls as tasks of a task group of asyncio: it waits for them, an error fails it, its cancel cancels them."""

from __future__ import annotations

import asyncio
from typing import Any

from trimesh.actor.calling.started import StartedCall
from trimesh.errors import RemoteCancelled


def check_group(group: object) -> None:
    """Refuse what is no task group.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(group, asyncio.TaskGroup):
        raise TypeError(f"start_in takes a trio.Nursery or an asyncio.TaskGroup, got {group!r}")


def hold(call: StartedCall[Any], group: asyncio.TaskGroup) -> None:
    """Make a task of a group that ends with a call.

    Raises:
        RuntimeError: The group takes no tasks; the call is cancelled.
    """
    waiting = _wait(call)
    try:
        group.create_task(waiting, name=repr(call))
    except BaseException:
        waiting.close()
        call.cancel("its task group takes no tasks")
        raise


async def _wait(call: StartedCall[Any]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await call
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            call.cancel("its task group was cancelled")
            continue  # what runs over there has to unwind first
        except RemoteCancelled:
            if not call.was_cut:
                raise
        if cancelled is not None:
            raise cancelled
        return
