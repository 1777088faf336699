"""`trimesh.aio.Actor`: the base class of actors that are asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import attrs
import trio

from trimesh._runtime.actors import LIVE, lifespan_of
from trimesh._runtime.values import ENDPOINTS, EndpointKind, EndpointSpec, endpoints_of
from trimesh.actor import actor
from trimesh.aio.in_asyncio import block_in_asyncio, items_from_asyncio, run_in_asyncio
from trimesh.aio.loop_thread import LoopThread, Tasks, lease, tasks_of_actor

_thread_of_actor: ContextVar[LoopThread] = ContextVar("trimesh_aio_thread")


class Actor(actor.Actor):
    """Base class of actors whose code runs in asyncio: engines, clients and servers that need a running loop.

    A subclass is written as one of `trimesh.Actor`, and handles on it look the same. Its `__init__`, `lifespan`,
    endpoints and generator endpoints run in tasks of one asyncio loop, which all such actors of a process share, in a
    thread of its own beside Trio's; a plain `def` endpoint runs on that loop, too, and `thread=True` in a worker
    thread. What they await of meshes works there as `trimesh.aio` says.

    A cancel or a deadline of the caller cancels the task of the endpoint, once, and the caller waits until it has
    ended. What `yield`s is ahead of its consumer as in Trio. Tasks that the actor has started and left behind are
    cancelled and waited for when it ends. `setup=` of the processes may set the event loop policy (uvloop).

    Cost: a call takes two switches between threads more than with `trimesh.Actor`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the endpoints of the class; see `trimesh.Actor`."""
        super().__init_subclass__(**kwargs)
        setattr(cls, ENDPOINTS, {name: _on_loop(spec) for name, spec in endpoints_of(cls).items()})


def _on_loop(spec: EndpointSpec) -> EndpointSpec:
    """Return what runs an endpoint on the loop of its actor."""
    function, name = spec.fn, f"{spec.name}()"
    if spec.kind is EndpointKind.THREAD:
        return spec
    if spec.kind is EndpointKind.GENERATOR:

        def generate(actor: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            return items_from_asyncio(_thread_of_actor.get(), partial(function, actor, *args, **kwargs), name)

        return attrs.evolve(spec, fn=generate)

    start = _in_a_task(function) if spec.kind is EndpointKind.INLINE else function

    async def run(actor: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return await run_in_asyncio(_thread_of_actor.get(), partial(start, actor, *args, **kwargs), name)

    return attrs.evolve(spec, fn=run, kind=EndpointKind.ASYNC)


def _in_a_task(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return function(*args, **kwargs)

    return call


@asynccontextmanager
async def _live(make: Callable[[], Any], made: Callable[[Any], None]) -> AsyncGenerator[None, None]:
    """Make an actor and be in its `lifespan`, both in asyncio; see `actors.life.Live`."""
    thread = await lease()
    tasks: Tasks = set()
    tasks_of_actor.set(tasks)
    _thread_of_actor.set(thread)
    try:
        actor = await run_in_asyncio(thread, _in_a_task(make), "__init__()")
        made(actor)
        del make  # it has the arguments, which are the actor's own from here on
        async with block_in_asyncio(thread, lifespan_of(actor), "lifespan"):
            del actor
            yield
    finally:
        try:
            if tasks and not thread.has_ended:
                with trio.CancelScope(shield=True):
                    await run_in_asyncio(thread, partial(_end, tasks), "the end of its tasks")
        finally:
            await thread.release()


async def _end(tasks: Tasks) -> None:
    """Cancel the tasks that an actor has left behind, and wait for them; what they raise is asyncio's to log."""
    while others := tasks - {asyncio.current_task()}:
        for task in others:
            task.cancel("its actor has ended")
        await asyncio.wait(others)


setattr(Actor, LIVE, staticmethod(_live))
