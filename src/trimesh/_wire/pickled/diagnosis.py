"""Finds which part of a value cannot be serialised, for the text of the error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from trimesh import limits

_TEXT_CHARS_MAX = 300


_STAYING = frozenset(("__dict__", "__weakref__", "__annotate_func__"))
"""Attributes of a class that do not travel."""


def offending_part(value: object, what: str, error: Exception, fails: Callable[[object], Exception | None]) -> str:
    """Return the text of the error for a value that could not be encoded.

    Args:
        value: The value.
        what: Its name for the user.
        error: What encoding it raised.
        fails: Encodes a part by itself and returns its error, or None.
    """
    path = ""
    budget = limits.DIAGNOSIS_OBJECTS
    overflows = limits.DIAGNOSIS_OVERFLOWS
    _forget_levels(error)
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for step, part in _parts(value):
            budget -= 1
            if budget < 0:
                break
            found = fails(part)
            if found is not None:
                path, value, error = path + step, part, found
                break
        else:
            break
        overflows -= isinstance(error, RecursionError)
        if budget < 0 or overflows <= 0:
            break
    cls = type(value)
    where = f" at {path.removeprefix('.').strip()}" if path else ""
    return (
        f"{what} cannot be serialised: {_short(error)}"
        f"{where} (a {cls.__module__}.{cls.__qualname__}); send plain data, or give the class a __reduce__"
    )


def offending_attribute(thing: object, fails: Callable[[object], Exception | None]) -> str | None:
    """Return how a class or function calls the part of it that cannot be encoded, or None if none fails by itself."""
    for name, part in list(getattr(thing, "__dict__", {}).items()):
        if name not in _STAYING and fails(part) is not None:
            return f"its attribute {name!r}"
    for default in getattr(thing, "__defaults__", None) or ():
        if fails(default) is not None:
            return f"its default {_name(default)}"
    names = getattr(getattr(thing, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(thing, "__closure__", None) or (), strict=False):
        if fails(cell) is not None:
            return f"its closure's {name!r}"
    return None


def _forget_levels(error: Exception) -> None:
    """Drop the notes of a stack overflow: since Python 3.14 pickle adds one for each level, tens of thousands."""
    if isinstance(error, RecursionError):
        error.__dict__.pop("__notes__", None)


def _short(error: Exception) -> str:
    text = f"{error}" if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARS_MAX else text[: _TEXT_CHARS_MAX - 3] + "..."


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a value with the step that leads to each."""
    whole: Any = value
    if isinstance(value, type):
        return
    if isinstance(value, Mapping):
        yield from _items(whole)
    elif isinstance(value, list | tuple):
        yield from _members(whole)
    elif isinstance(value, set | frozenset):
        yield from ((f" member {_name(part)}", part) for _, part in _members(whole))
    if not isinstance(type(whole).__reduce_ex__, FunctionType):  # such a class says itself why it does not travel
        yield from _attributes(whole)


def _items(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in list(value.items()):
        yield f" key {_name(key)}", key
        yield f"[{_name(key)}]", part


def _members(value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for index, part in enumerate(list(value)):
        yield f"[{index}]", part


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    for name, part in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", part
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:
                continue


def _name(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 - a user's repr; the error is about something else
        return f"<{type(key).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
