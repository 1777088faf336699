"""Data of Python that a recorded function reads from around it: a replay runs no Python, so it must be so still."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import attrs

from trimesh import limits
from trimesh.tensor.protocol.errors import RecordingError

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_ROWS: Final = (list, tuple, set, frozenset, deque)


class WrappedFunction:
    """A function that is called by way of an object.

    Attributes:
        function: The function.
    """

    function: Callable[..., Any]


@attrs.frozen
class Surroundings:
    """What a function read at one moment: numbers, texts, and containers of them, by what they are called there.

    SR-1 It is found in the function's closure, in the globals that its code names, in its defaults, in the attributes
    of what it is a method of, and in the same of functions of its module that it finds there. Not in objects elsewhere.
    """

    by_name: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any) -> Surroundings:
        budget = itertools.count(limits.RECORDED_DATA_MAX, -1)
        found: dict[str, Any] = {}
        for name, value in _read_by(function, set()):
            taken = _taken(value, budget)
            if taken is not None:
                found[name] = taken
        return cls(found)

    def check_own(self, name: str, after: Surroundings) -> None:
        """Refuse to record a function whose own call has changed what it reads.

        Raises:
            RecordingError: It has.
        """
        changed = self._changed(after)
        if changed is not None:
            raise RecordingError(
                f"{name} changes what it reads: {changed} was {_shown(self, changed)} before a call and "
                f"{_shown(after, changed)} after it. None of its Python code runs in a replay, which would go on with "
                "what it was: do that outside of it, and give it what changes as a tensor on the mesh"
            )

    def check(self, name: str, now: Surroundings) -> None:
        """Refuse a replay that would read something else.

        Raises:
            RecordingError: It would.
        """
        changed = self._changed(now)
        if changed is not None:
            raise RecordingError(
                f"{name} was recorded with {changed}={_shown(self, changed)}, and it is {_shown(now, changed)} now: a "
                f"number that changes must be a tensor on the mesh; or write {name}.reset() before it"
            )

    def _changed(self, other: Surroundings) -> str | None:
        if self.by_name == other.by_name:
            return None
        names = {**self.by_name, **other.by_name}
        return next((name for name in names if self.by_name.get(name) != other.by_name.get(name)), None)


def _shown(of: Surroundings, name: str) -> str:
    if name not in of.by_name:
        return "no data"
    text = repr(_plain(of.by_name[name]))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_by(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what a function finds around it, with names for people."""
    if isinstance(function, functools.partial):
        yield from (("an argument of a partial", one) for one in ((*function.args, function.keywords),))
        yield from _read_by(function.func, seen)
        return
    if isinstance(function, MethodType):
        owner = function.__self__
        yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())
        yield from _read_by(function.__func__, seen)
        return
    if not isinstance(function, FunctionType):
        call = getattr(function, "__call__", None)  # noqa: B004 - its function is wanted
        if isinstance(call, MethodType):
            yield from _read_by(call, seen)
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    around = dict(_named_by(function))
    yield from around.items()
    if function.__defaults__ or function.__kwdefaults__:
        yield f"a default of {function.__name__}", (*(function.__defaults__ or ()), function.__kwdefaults__)
    for value in around.values():
        called = value.function if isinstance(value, WrappedFunction) else value
        if isinstance(called, FunctionType) and called.__module__ == function.__module__:
            yield from _read_by(called, seen)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # functions within it
            yield from _names_in(constant)


def _taken(value: Any, budget: Iterator[int]) -> Any:
    """Return data as it is now, with types, for 1 equals True and 1.0; None for what is no data."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, (value.hex() if kind is float else value)
    if not isinstance(value, (dict, *_ROWS)):
        return None
    if len(value) > next(budget):
        return kind, len(value)
    parts = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return kind, tuple([_taken(one, budget) if next(budget) > 0 else None for one in parts])


def _plain(taken: Any) -> Any:
    if taken is None:
        return ...
    kind, value = taken
    if kind is float:
        return float.fromhex(value)
    if kind in _PLAIN:
        return value
    return [_plain(one) for one in value] if isinstance(value, tuple) else f"{kind.__name__} of {value}"
