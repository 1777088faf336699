"""Run the ranks of one program together: the first failure ends the others.

RK-1 a rank that fails for a reason of its own ends the others at once.
RK-2 one that fails since a peer is gone is a consequence: the peer's own failure has `limits.SPMD_VERDICT_SECONDS` to
     be known before the others are ended.
RK-3 consequences are told as a note on a failure that is none, and raised only where there is no other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from trimesh import limits
from trimesh._runtime.meshes import says_peer_is_gone, text_says_peer_is_gone
from trimesh.errors import MeshErrorGroup, add_note, leaves, origin
from trimesh.shape.point import place_name
from trimesh.spmd.failure import ScriptFailed

R = TypeVar("R")


async def run_together(ranks: Sequence[Callable[[], Awaitable[R]]], name: str) -> list[R]:
    """Run what each rank does; return the results.

    Args:
        ranks: What they do.
        name: Of the mesh, for the error.

    Raises:
        MeshErrorGroup: Some have failed; the others were cancelled.
    """
    results: dict[int, R] = {}
    failures: list[Exception] = []
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        async def run(rank: int, work: Callable[[], Awaitable[R]]) -> None:
            try:
                results[rank] = await work()
            except Exception as error:  # noqa: BLE001 - raised below, with the others
                failures.append(error)
                if _is_consequence(error):
                    scope.deadline = min(scope.deadline, trio.current_time() + limits.SPMD_VERDICT_SECONDS)
                else:
                    scope.cancel(reason="another rank has failed")

        for rank, work in enumerate(ranks):
            nursery.start_soon(run, rank, work)
    if failures:
        raise MeshErrorGroup(f"{name} failed", _told(failures), mesh=name)
    return [results[rank] for rank in range(len(ranks))]


def _is_consequence(error: Exception) -> bool:
    return all(
        text_says_peer_is_gone(leaf.stderr_tail) if isinstance(leaf, ScriptFailed) else says_peer_is_gone(leaf)
        for leaf in leaves(error)
    )


def _told(failures: Sequence[Exception]) -> list[Exception]:
    """Return the failures that are no consequences, if there are any, with a note on those that are."""
    causes = [error for error in failures if not _is_consequence(error)]
    others = [error for error in failures if error not in causes]
    if not causes:
        return others
    if others:
        places = [origin(leaf) for error in others for leaf in leaves(error)]
        where = ", ".join(place_name(one.mesh, one.point) for one in places if one is not None)
        add_note(causes[0], f"ranks that failed since a peer was gone: {where}")
    return causes
