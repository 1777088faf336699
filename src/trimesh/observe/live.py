"""Overview of a run below a cell of a notebook, drawn anew while a block is open."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio_block
from trimesh.context_managers import asynccontextmanager
from trimesh.observe.cell_output import CellOutput, open_cell_output
from trimesh.observe.overview import Overview
from trimesh.observe.run import snapshot
from trimesh.observe.run_snapshot import RunSnapshot

_log = logging.getLogger("trimesh")


def live(mesh: str) -> AbstractAsyncContextManager[None]:
    """Return the block of `ProcMesh.live`; to be called in the thread of the cell.

    Args:
        mesh: Name of the mesh that comes first.
    """
    return in_trio_block(_live(Overview(mesh), open_cell_output()))


@asynccontextmanager
async def _live(overview: Overview, output: CellOutput | None) -> AsyncGenerator[None, None]:
    proc = current_proc()
    if output is None or proc.is_simulated:
        yield
        return
    scope, ended = trio.CancelScope(), trio.Event()
    proc.nursery.start_soon(_draw, overview, output, scope, ended)
    try:
        yield
    finally:
        scope.cancel(reason="the block of live() is left")
        with trio.CancelScope(shield=True):
            await ended.wait()
            await trio.to_thread.run_sync(output.close)


async def query_run(seconds: float) -> RunSnapshot:
    """Return a snapshot with the time of its query: processes answer then, and counts divided by it are rates."""
    at = time.time()
    return msgspec.structs.replace(await snapshot(seconds=seconds), taken_at=at)


@trio.lowlevel.enable_ki_protection
async def _draw(overview: Overview, output: CellOutput, scope: trio.CancelScope, ended: trio.Event) -> None:
    try:
        with scope:
            while True:
                began_at = trio.current_time()
                overview.add(await query_run(limits.OBSERVE_SECONDS))
                drawn_from = trio.current_time()
                output.show(await trio.to_thread.run_sync(overview.html))
                took = trio.current_time() - drawn_from
                await trio.sleep_until(began_at + max(limits.LIVE_SECONDS, took / limits.LIVE_SHARE))
        with trio.move_on_after(limits.LIVE_LAST_SECONDS, shield=True):
            overview.add(await query_run(limits.LIVE_LAST_SECONDS))
        output.show(overview.html(has_ended=True))
    except Exception:  # noqa: BLE001 - whatever fails in the notebook, the run goes on
        _log.exception("the overview of the run is not shown any more: drawing it failed")
    finally:
        ended.set()
