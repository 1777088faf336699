"""How an actor is made and what is around its service, by its class: in Trio, unless the class says otherwise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final

ServeSlot = Callable[[Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Is the task of a slot of the mailbox: given what serves it, has that done as the actor needs it."""

Live = Callable[[Callable[[], Any], Callable[[Any], None]], AbstractAsyncContextManager[ServeSlot | None]]
"""Makes an actor and enters its `lifespan`: a block around all that it serves. Gives what serves slots, if not Trio.

Its arguments: what makes the object, and what is told of it once it is made, before its `lifespan` begins.
"""

LIVE: Final = "__trimesh_live__"
"""Attribute of an actor class that holds its `Live`."""


@asynccontextmanager
async def _live_in_trio(make: Callable[[], Any], made: Callable[[Any], None]) -> AsyncGenerator[None, None]:
    actor = make()
    made(actor)
    del make  # it has the arguments, which are the actor's own from here on
    async with lifespan_of(actor):
        del actor
        yield


def live_of(cls: type) -> Live:
    """Return how actors of a class are made and live."""
    live: Live = getattr(cls, LIVE, _live_in_trio)
    return live


def lifespan_of(actor: Any) -> AbstractAsyncContextManager[Any]:
    """Return what the class of an actor has as `lifespan`; without one, a block that does nothing."""
    # Of the class, as Python looks up `__enter__`: an object may have a `__getattr__` that answers any name.
    mro: tuple[type, ...] = type(actor).__mro__
    found: Any = next((vars(base)["lifespan"] for base in mro if "lifespan" in vars(base)), None)
    if found is None:
        return nullcontext()
    bound: Any = found.__get__(actor, mro[0]) if hasattr(found, "__get__") else found
    block: AbstractAsyncContextManager[Any] = bound()
    return block
