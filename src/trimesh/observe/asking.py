"""Snapshots of the program itself."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh.observe.merging import RunSnapshot, merge
from trimesh.observe.unanswered import unanswered, with_records


async def snapshot(*, seconds: float = limits.OBSERVE_SECONDS, rows_max: int = limits.OBSERVED_ROWS) -> RunSnapshot:
    """Return what this process and all that it owns do.

    In a controller that is the whole run; in an actor, its process and those below it. All are asked at once. One whose
    Trio loop does not run is asked by a signal: it is there as "stuck", with its stack. One in which C code holds the
    GIL is "silent", with its stack, too.

    Args:
        seconds: For the answers.
        rows_max: Rows of a table; `cut` of the snapshot says how many were left out.

    Raises:
        RuntimeError: No mesh is open here.

    Blocking: a checkpoint; a few milliseconds if every loop runs, else at most `seconds`.
    """
    return await in_trio(_snapshot)(seconds, rows_max)


async def _snapshot(seconds: float, rows_max: int) -> RunSnapshot:
    await trio.lowlevel.checkpoint()
    views = await current_proc().inquiries.ask(seconds)
    if unanswered(views):
        views = await trio.to_thread.run_sync(with_records, views)
    return merge(views, time.time(), rows_max=rows_max)


async def watch(*, every: float = 1.0, rows_max: int = limits.OBSERVED_ROWS) -> AsyncGenerator[RunSnapshot, None]:
    """Yield snapshots again and again, the first at once.

    Args:
        every: Seconds between two.
        rows_max: As of `snapshot`.

    Raises:
        RuntimeError: No mesh is open here.
    """
    while True:
        yield await snapshot(rows_max=rows_max)
        await in_trio(trio.sleep)(every)
