"""The replicas of a pool whose mesh grows and shrinks: it follows, and `resize` changes the mesh.

PZ-1 a replica that has left its mesh gets no requests; those that it ran go elsewhere if they have not begun, or may
     run twice. It keeps its index: one that comes back at its place is the same replica.
PZ-2 to shrink, `resize` drains first: what runs there runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.procs.current import current_view
from trimesh.service.pool.engine import PoolEngine


class ElasticReplicas:
    """Follows the size of a mesh on behalf of one pool.

    Attributes:
        on_new: Called with the index of each replica that is new to the pool.
    """

    def __init__(self, engine: PoolEngine, procs: ProcMesh, along: str) -> None:
        """Begin with the replicas that the pool has.

        Args:
            engine: The pool.
            procs: The processes that its actors live in.
            along: The dimension whose places are replicas: the first one of both meshes.

        Raises:
            ValueError: The processes are not those of the actors, or not along that dimension.
        """
        self.on_new: Callable[[int], None] = lambda _: None
        self._engine = engine
        self._procs = procs
        self._along = along
        self._lock = trio.Lock()
        labels = list(procs.extent)[:1], list(engine.mesh.extent)[:1]
        if labels != ([along], [along]):
            raise ValueError(
                f"a pool follows the size of its processes along their first dimension, and along={along!r} is not the "
                f"first of {procs!r} and of {engine.mesh!r}"
            )

    async def watch(self) -> None:
        """Follow for as long as the pool is open."""
        async with self._procs.membership() as views:
            async for _ in views:
                await self._follow()

    async def _follow(self) -> None:
        engine = self._engine
        mesh: Any = await current_view(engine.mesh)
        size: int = mesh.size(self._along)
        for index in range(len(engine.views), size):
            engine.add(mesh.slice(**{self._along: index}))
            self.on_new(index)
        for index in range(len(engine.views)):
            engine.set_absent(index, is_absent=index >= size)
        engine.pump()

    async def resize(self, replicas: int) -> None:
        """See `Pool.resize`."""
        engine = self._engine
        async with self._lock:
            leaving = range(replicas, len(engine.views))
            for index in leaving:
                engine.dispatcher.set_drained(index, is_drained=True)
            engine.pump()
            try:
                await engine.wait_until(lambda: not any(engine.dispatcher.replicas[one].running for one in leaving))
                await self._procs.resize(**{self._along: replicas})
                await self._follow()
            finally:
                for index in leaving:  # those that have left are kept out as long as they are absent
                    engine.dispatcher.set_drained(index, is_drained=False)
                engine.pump()


def elastic_of(engine: PoolEngine, procs: ProcMesh | None, along: str | None) -> ElasticReplicas | None:
    """Return what lets a pool follow its processes; None when it was given none.

    Raises:
        TypeError: `procs` is no mesh of processes.
        ValueError: See `ElasticReplicas`.
    """
    if procs is None:
        return None
    if not isinstance(procs, ProcMesh):
        raise TypeError(f"procs must be the mesh of processes that the actors live in, got {procs!r}")
    if along is None:
        raise ValueError("a pool that follows its processes needs along=, their first dimension: along='replica'")
    return ElasticReplicas(engine, procs, along)
