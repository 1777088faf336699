"""`open_pool`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh, processes_of
from trimesh.actor.host_mesh import this_proc
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.plain_numbers import plain_whole
from trimesh.service.dispatch.adaptive import Adaptive
from trimesh.service.dispatch.dispatcher import Dispatcher
from trimesh.service.dispatch.routes import ByFunction, LeastLoaded, PoolRoute
from trimesh.service.pool.elastic import ElasticReplicas, elastic_of
from trimesh.service.pool.engine import PoolEngine
from trimesh.service.pool.front import PoolFront, number_of
from trimesh.service.pool.health import Health
from trimesh.service.pool.pool import Pool

_log = logging.getLogger("trimesh")

A = TypeVar("A", bound=Actor)


def open_pool(
    mesh: A,
    *,
    along: str | None = None,
    route: PoolRoute | Callable[..., Any] | None = None,
    concurrency: int | Adaptive = limits.POOL_CONCURRENCY,
    queue: int = limits.POOL_QUEUE,
    queue_bytes: int = limits.POOL_QUEUE_BYTES,
    sessions: int = limits.POOL_SESSIONS,
    health: Health | None = None,
    procs: ProcMesh | None = None,
) -> AbstractAsyncContextManager[Pool[A]]:
    """Put the actors of a mesh behind one name.

    `async with open_pool(generators, along="replica") as pool: text = await pool.generate(prompt)`.

    Args:
        mesh: The actors; owned by its own block, whose policy (`Isolate`, `Restart`) handles deaths.
        along: The dimension whose places are the replicas; a replica is all of the mesh there. Without it each member
            is one.
        route: Which replica gets a request: `LeastLoaded()` (the default), `Affinity(...)`, `RoundRobin()`, or a
            function of the request and the replicas that have room, which returns one of them.
        concurrency: Requests that one replica runs at once: a number, or `Adaptive(...)`. The endpoints need as many
            slots: `@endpoint(concurrency=...)`.
        queue: Requests that may wait; further callers wait to be let in, or are refused (`Pool.options`).
        queue_bytes: Bytes that the arguments of those may have.
        sessions: Sessions that are remembered.
        health: How to ask replicas whether they are well; without it only deaths take them out.
        procs: The processes that the actors live in, where `along` is their first dimension: then the pool follows
            their size, and `Pool.resize` changes it.

    Returns:
        A context manager that gives the pool. Leaving it refuses new requests, cancels those under way with
        `MeshStopped` at their callers, and waits until they have unwound.

    Raises:
        TypeError: `mesh` is no mesh of actors, or `procs` none of processes.
        ValueError: A number is out of its bounds, or the mesh is empty.
        ShapeError: The mesh has no such dimension.
    """
    handle: Any = mesh
    if not isinstance(handle, ActorMesh):
        raise TypeError(f"open_pool takes a mesh of actors, as `await procs.spawn(...)` gives it, got {handle!r}")
    concurrency, queue, queue_bytes = plain_whole(concurrency), plain_whole(queue), plain_whole(queue_bytes)
    if queue == 0:
        raise ValueError(
            "queue must be at least 1, got 0: requests of sessions, and those that a replica's death sends elsewhere, "
            'pass through it; for no more waiting than that write queue=1 and options(when_full="refuse")'
        )
    for name, number in (("concurrency", concurrency), ("queue", queue), ("queue_bytes", queue_bytes)):
        if not isinstance(number, Adaptive) and not (isinstance(number, int) and number >= 1):
            raise ValueError(f"{name} must be a number of at least 1, got {number!r}")
    _check_slots(handle, concurrency)
    views = _replicas(handle, along)
    if not views:
        raise ValueError(f"a pool needs at least one replica, got the empty view {handle!r}")
    if route is None:
        route = LeastLoaded()
    if health is not None and health.kill:
        processes_of(handle)  # refused now rather than when a replica is sick
    dispatcher = Dispatcher(
        len(views),
        route=route if isinstance(route, PoolRoute) else ByFunction(route),
        concurrency=concurrency,
        queue=queue,
        queue_bytes=queue_bytes,
        sessions=sessions,
    )
    engine = PoolEngine(handle, views, dispatcher)
    return in_trio_block(_open(engine, health, elastic_of(engine, procs, along)))


def _check_slots(mesh: ActorMesh, concurrency: int | Adaptive) -> None:
    """Log a given concurrency that no endpoint has: further requests would wait at the replica."""
    if isinstance(concurrency, Adaptive) or concurrency == limits.POOL_CONCURRENCY:
        return
    slots = max((spec.concurrency for spec in mesh._view.endpoints.values()), default=1)  # noqa: SLF001 - of endpoints
    if concurrency > slots:
        _log.warning(
            "open_pool(concurrency=%d) exceeds what the endpoints of %s run at once, %d: further requests wait at the "
            "replica, and cannot go to another one; write @endpoint(concurrency=%d), or open_pool(concurrency=%d)",
            concurrency,
            mesh.name,
            slots,
            concurrency,
            slots,
        )


def _replicas(mesh: ActorMesh, along: str | None) -> list[ActorMesh]:
    if along is not None:
        return [mesh.slice(**{along: index}) for index in range(mesh.size(along))]
    return [mesh.slice(**dict(point)) for point in mesh.points()]


def _watch_new(nursery: trio.Nursery, health: Health, engine: PoolEngine, index: int) -> None:
    nursery.start_soon(health.watch, engine, index)


@asynccontextmanager
async def _open(
    engine: PoolEngine, health: Health | None, elastic: ElasticReplicas | None
) -> AsyncGenerator[Pool[Any], None]:
    name = f"pool of {engine.mesh.name}"[: limits.NAME_CHARS_MAX]
    async with this_proc().spawn(name, PoolFront, number_of(engine)) as front, trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch)
        if health is not None:
            for index in range(len(engine.views)):
                nursery.start_soon(health.watch, engine, index)
        if elastic is not None:
            if health is not None:
                elastic.on_new = partial(_watch_new, nursery, health, engine)
            engine.change_size = elastic.resize
            nursery.start_soon(elastic.watch)
        try:
            yield Pool(engine, front, engine.mesh.name)
        finally:
            await engine.close()
            nursery.cancel_scope.cancel(reason="the block of the pool is being left")
