"""The two sides of a service: how the actor beside it finds it, and how its handles change it.

Arguments of actors are copied; a number stands for the thing itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import trio

from trimesh._runtime.tasks import in_trio, in_trio_now
from trimesh.service.work.certain import certainly

_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def hand_over(thing: Any) -> int:
    """Return a number for a thing of this process, while it lives."""
    number = next(_numbers)
    _things[number] = thing
    return number


def take_over(number: int) -> Any:
    """Return the thing."""
    return _things[number]


async def change(own: Callable[[int], None] | None, front: Callable[[int], Awaitable[Any]], number: int) -> None:
    """Change the state of a service, here where it lives (`own`), or by the actor beside it; a checkpoint."""
    if own is None:
        await in_trio(certainly)(partial(front, number))
        return
    in_trio_now(own)(number)
    await in_trio(trio.lowlevel.checkpoint)()
