"""Spawns that take long: shown as progress, and logged once with where each process is that is not ready."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.watch.report import describe_waiting
from trimesh._runtime.watch.shown_progress import showing
from trimesh._wire.exceptions.tracebacks import is_hidden

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.values.reference import MeshInfo

_log = logging.getLogger("trimesh")


@contextmanager
def starting(proc: Proc, info: MeshInfo, ranks: Sequence[int]) -> Generator[None, None, None]:
    """Surround the wait for the actors of a mesh to be ready."""
    scope = trio.CancelScope()
    proc.nursery.start_soon(_log_what_it_waits_for, proc, info, ranks, scope)
    try:
        with showing(proc, f"spawning {info.name} on {len(ranks)} processes"):
            yield
    finally:
        scope.cancel(reason=f"{info.name} has started, or failed to")


@trio.lowlevel.enable_ki_protection
async def _log_what_it_waits_for(proc: Proc, info: MeshInfo, ranks: Sequence[int], scope: trio.CancelScope) -> None:
    with scope:
        await trio.sleep(limits.SPAWNING_LOG_SECONDS)
        there = {info.members[rank].proc_id for rank in ranks}
        members = [member for proc_id, member in proc.members.items() if proc_id in there]
        lines = [line for line in await describe_waiting(proc, members) if not is_hidden(line)]
        if len(lines) > limits.SPAWNING_LOG_LINES:
            left_out = len(lines) - limits.SPAWNING_LOG_LINES
            lines[limits.SPAWNING_LOG_LINES :] = [f"  and {left_out} lines more, which trimesh.dump() writes"]
        _log.warning(
            "spawn of %s has waited for %g s: __init__ or lifespan has not ended yet in:\n%s",
            info.name,
            limits.SPAWNING_LOG_SECONDS,
            "\n".join(lines) or "  processes of another owner",
        )
