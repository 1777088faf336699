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

from trimesh._runtime.actors import LIVE, ServeSlot, lifespan_of
from trimesh._runtime.life import current_proc
from trimesh._runtime.values import ENDPOINTS, EndpointKind, EndpointSpec, endpoints_of
from trimesh.actor import actor
from trimesh.aio.asyncio_work import Tasks, block_in_asyncio, items_from_asyncio, run_in_asyncio, tasks_of_actor
from trimesh.aio.loops import LoopThread, MainLoop, lease_main_loop, lease_thread
from trimesh.aio.slots import running_slot

_loop_of_actor: ContextVar[MainLoop | LoopThread] = ContextVar("trimesh_aio_loop")


class Actor(actor.Actor):
    """Base class of actors whose code runs in asyncio: engines, clients and servers that need a running loop.

    A subclass is written as one of `trimesh.Actor`, and handles on it look the same. Its `__init__`, `lifespan`,
    endpoints and generator endpoints run in tasks of one asyncio loop, which all such actors of a process share, on the
    main thread; a plain `def` endpoint runs on that loop, too, and `thread=True` in a worker thread. What they await of
    meshes works there as `trimesh.aio` says.

    Code that blocks the loop stops links and other actors of the process meanwhile. `class Engine(trimesh.aio.Actor,
    own_thread=True)` gives actors of such classes a loop in a thread of their own, beside Trio's. Subclasses inherit
    it. In the controller (`this_proc()`) the loop is always in a thread.

    A cancel or a deadline of the caller cancels the task of the endpoint, once, and the caller waits until it has
    ended. What `yield`s is ahead of its consumer as in Trio. Tasks that the actor has started and left behind are
    cancelled and waited for when it ends. `setup=` of the processes may set the event loop policy (uvloop).

    Cost: a call takes 1.3 to 1.8 times as long as with `trimesh.Actor`, and two thread switches more with
    `own_thread=True`.
    """

    _own_thread = False

    def __init_subclass__(cls, *, own_thread: bool | None = None, **kwargs: Any) -> None:
        """Collect the endpoints of the class; see `trimesh.Actor`."""
        super().__init_subclass__(**kwargs)
        if own_thread is not None:
            cls._own_thread = own_thread
        setattr(cls, ENDPOINTS, {name: _on_loop(spec) for name, spec in endpoints_of(cls).items()})


def _on_loop(spec: EndpointSpec) -> EndpointSpec:
    """Return what runs an endpoint on the loop of its actor."""
    function, name = spec.fn, f"{spec.name}()"
    if spec.kind is EndpointKind.THREAD:
        return spec
    if spec.kind is EndpointKind.GENERATOR:

        def generate(actor: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            return items_from_asyncio(_loop_of_actor.get(), partial(function, actor, *args, **kwargs), name)

        return attrs.evolve(spec, fn=generate)

    start = _in_a_task(function) if spec.kind is EndpointKind.INLINE else function

    async def run(actor: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        work, slot = partial(start, actor, *args, **kwargs), running_slot()
        if slot is None:
            return await run_in_asyncio(_loop_of_actor.get(), work, name)
        return await slot.call(work, name)

    return attrs.evolve(spec, fn=run, kind=EndpointKind.ASYNC)


def _in_a_task(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return function(*args, **kwargs)

    return call


@asynccontextmanager
async def _live(
    cls: type[Actor], make: Callable[[], Any], made: Callable[[Any], None]
) -> AsyncGenerator[ServeSlot | None, None]:
    """Make an actor and be in its `lifespan`, both in asyncio; see `actors.life.Live`."""
    loop = await _lease(own_thread=cls._own_thread)
    tasks: Tasks = set()
    tasks_of_actor.set(tasks)
    _loop_of_actor.set(loop)
    try:
        actor = await run_in_asyncio(loop, _in_a_task(make), "__init__()")
        made(actor)
        del make  # it has the arguments, which are the actor's own from here on
        async with block_in_asyncio(loop, lifespan_of(actor), "lifespan"):
            del actor
            yield loop.serve_slot if isinstance(loop, MainLoop) else None
    finally:
        try:
            if tasks and not loop.has_ended:
                with trio.CancelScope(shield=True):
                    await run_in_asyncio(loop, partial(_end, tasks), "the end of its tasks")
        finally:
            await loop.release()


async def _lease(*, own_thread: bool) -> MainLoop | LoopThread:
    """Use the loop that an actor of the running process is to have. Release it.

    Raises:
        RuntimeError: The process is ending, or is a simulated one.
    """
    proc = current_proc()
    if proc.is_simulated:
        raise RuntimeError(
            "an actor in a simulation must be one of Trio, got one of trimesh.aio.Actor, whose loop has a clock of its "
            'own: test it over real processes, `@pytest.mark.mesh_backend("proc")`, or call what it computes from an '
            "actor of Trio"
        )
    return (None if own_thread else await lease_main_loop(proc)) or await lease_thread(proc)


async def _end(tasks: Tasks) -> None:
    """Cancel the tasks that an actor has left behind, and wait for them; what they raise is asyncio's to log."""
    while others := tasks - {asyncio.current_task()}:
        for task in others:
            task.cancel("its actor has ended")
        await asyncio.wait(others)


setattr(Actor, LIVE, classmethod(_live))
