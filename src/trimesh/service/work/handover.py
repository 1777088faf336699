"""How the actor beside a service finds it: arguments of actors are copied, a number stands for the thing itself."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

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
