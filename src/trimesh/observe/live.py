"""Overview of a run below a cell of a notebook, drawn anew while a block is open."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.sampling import sampling_of
from trimesh._runtime.tasks import in_trio_block
from trimesh.context_managers import asynccontextmanager
from trimesh.observe.cell_output import CellOutput, open_cell_output
from trimesh.observe.history import query
from trimesh.observe.overview import Overview
from trimesh.observe.past import Past, read_past
from trimesh.observe.run import snapshot

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


async def look(overview: Overview, seconds: float) -> None:
    """Add a snapshot and new samples. Processes answer when they are asked: the rates are between those times."""
    at = time.time()
    seen = msgspec.structs.replace(await snapshot(seconds=seconds), taken_at=at)
    overview.curves.newest, samples = sampling_of(current_proc()).read(overview.curves.newest)
    overview.add(seen, samples)


def _read_past() -> Past:
    return read_past(partial(query, pid=os.getpid()))


@trio.lowlevel.enable_ki_protection
async def _draw(overview: Overview, output: CellOutput, scope: trio.CancelScope, ended: trio.Event) -> None:
    try:
        with scope:
            overview.load(await trio.to_thread.run_sync(_read_past, abandon_on_cancel=True))
            while True:
                began_at = trio.current_time()
                await look(overview, limits.OBSERVE_SECONDS)
                drawn_from = trio.current_time()
                output.show(await trio.to_thread.run_sync(overview.html))
                took = trio.current_time() - drawn_from
                await trio.sleep_until(began_at + max(limits.LIVE_SECONDS, took / limits.LIVE_SHARE))
        with trio.move_on_after(limits.LIVE_LAST_SECONDS, shield=True):
            await sampling_of(current_proc()).collect()
            await look(overview, limits.LIVE_LAST_SECONDS)
        output.show(overview.html(has_ended=True))
    except Exception:  # noqa: BLE001 - whatever fails in the notebook, the run goes on
        _log.exception("the overview of the run is not shown any more: drawing it failed")
    finally:
        ended.set()
