"""What an object does when one operation happens after the other: the measure of a history. PURE.

state, call  --step-->  next state, result        or None: the call cannot happen in this state
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import attrs

from trimesh.testing.histories.operation import Call

State = Any
"""Of a model; it must have a hash, as numbers, strings, tuples and frozensets do."""

Step = Callable[[State, Call], "tuple[State, Any] | None"]


@attrs.frozen
class Model:
    """A sequential model: a state, and a pure function that says what each call makes of it and returns.

    Attributes:
        initial: State before the first operation.
        step: `step(state, call)` gives the next state and the result, or None where the call cannot happen. A call is a
            tuple of the operation's name and its arguments: `match call: case ("add", n): return state + n, state + n`.
        key: What a call is about, or None. Objects of different keys are independent, each begins with `initial`, and
            each is checked by itself, which is much faster.

    Example:
        >>> def step(state, call):
        ...     match call:
        ...         case ("add", n):
        ...             return state + n, state + n
        ...         case ("read",):
        ...             return state, state
        >>> Model(0, step).step(3, ("add", 2))
        (5, 5)
    """

    initial: State
    step: Step
    key: Callable[[Call], Hashable] | None = None

    def keyed(self) -> Model:
        """Return the model of many such objects; the first argument of each call says which: `("write", "x", 3)`."""
        step = self.step
        return Model(self.initial, lambda state, call: step(state, (call[0], *call[2:])), lambda call: call[1])

    @classmethod
    def register(cls, initial: Any = None) -> Model:
        """A value: `read()` returns it, `write(value)` returns None, `cas(old, new)` whether it was `old`."""
        return cls(initial, _register)

    @classmethod
    def counter(cls, initial: float = 0) -> Model:
        """A number: `read()` and `add(n)` return it; what `add` returns holds the new number."""
        return cls(initial, _counter)

    @classmethod
    def set(cls) -> Model:
        """A set, each value by itself: `add(value)` and `discard(value)` return whether it changed, `has(value)` so.

        Calls about the whole set, as its size, need a model of their own: values are checked one by one.
        """
        return cls(initial=False, step=_one_value, key=lambda call: call[1])

    @classmethod
    def queue(cls) -> Model:
        """First in, first out: `put(value)` returns None, `get()` the oldest, and cannot happen when there is none."""
        return cls((), _queue)


def _register(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("read",):
            return state, state
        case ("write", value):
            return value, None
        case ("cas", old, new):
            return (new, True) if state == old else (state, False)
        case _:
            raise _unknown(call, "read(), write(value), cas(old, new)")


def _counter(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("read",):
            return state, state
        case ("add", n):
            return state + n, state + n
        case _:
            raise _unknown(call, "read(), add(n)")


def _one_value(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("add", _):
            return True, not state
        case ("discard", _):
            return False, state
        case ("has", _):
            return state, state
        case _:
            raise _unknown(call, "add(value), discard(value), has(value)")


def _queue(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("put", value):
            return (*state, value), None
        case ("get",):
            return (state[1:], state[0]) if state else None
        case _:
            raise _unknown(call, "put(value), get()")


def _unknown(call: Call, known: str) -> ValueError:
    return ValueError(f"this model has the operations {known}; the history has {call!r}: write a Model of your own")
