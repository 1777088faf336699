"""Finds which part of a value cannot be serialised, for the text of the error."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final

from trimesh import limits
from trimesh._wire.pickled.by_value import DefinitionError

_TEXT_CHARS_MAX = 300

_REMEDIES: Final = {
    "_contextvars.ContextVar": "send its value, `.get()`",
    "_io._IOBase": "send its path, and open it where it is used",
    "_socket.socket": "send its address, and connect where it is used",
    "_thread.RLock": "a lock works in one process: leave it out in __getstate__, and make one where it is used",
    "_thread.lock": "a lock works in one process: leave it out in __getstate__, and make one where it is used",
    "builtins.async_generator": "send a list of its items, or one call for each (`map`)",
    "builtins.coroutine": "write `await` before it, to send its result",
    "builtins.generator": "send a list of its items, or one call for each (`map`)",
    "threading.Thread": "start it where it is used",
}
"""What works in place of values of some classes, by their names, that never leave their process."""

_BY_VALUE_REMEDY: Final = (
    "what a script, notebook or function defines travels by value: move the definition into a module, or create that "
    "part in __init__"
)
_REMEDY: Final = "send plain data, or give the class a __reduce__"

_PICKLES: Final = sys.stdlib_module_names | {"cloudpickle", "trimesh"}


_STAYING = frozenset(("__dict__", "__weakref__", "__annotate_func__"))
"""Attributes of a class that do not travel."""


def offending_part(
    value: object, what: str, error: Exception, fails: Callable[[object], Exception | None], root: str = ""
) -> str:
    """Return the text of the error for a value that could not be encoded.

    Args:
        what: Its name for the user.
        error: What encoding it raised.
        fails: Encodes a part by itself and returns its error, or None.
        root: What the path to the part begins with.
    """
    path = ""
    budget = limits.DIAGNOSIS_OBJECTS
    overflows = limits.DIAGNOSIS_OVERFLOWS
    _forget_levels(error)
    seen: set[int] = set()
    while id(value) not in seen:
        if isinstance(error, DefinitionError) and isinstance(value, type | FunctionType):
            break  # it names what is in the definition
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
    where = f" at {root}{path if root else path.lstrip(', .')}" if path else ""
    if isinstance(error, DefinitionError):
        return f"{what} cannot be serialised: {_short(error)}{where}; {_BY_VALUE_REMEDY}"
    advice = "" if _says_itself(value) else f"; {_remedy(value)}"
    return f"{what} cannot be serialised: {_short(error)}{where} (a {cls.__module__}.{cls.__qualname__}){advice}"


def _remedy(value: object) -> str:
    """Return what to send in place of a value."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__)
    return next((_REMEDIES[name] for name in names if name in _REMEDIES), _REMEDY)


def shown_cause(error: Exception) -> BaseException | None:
    """Return what tells more than the text of the error does, which has the words of pickle."""
    if isinstance(error, DefinitionError):
        return error.__cause__
    if not isinstance(error, TypeError | pickle.PicklingError):
        return error
    link = error.__traceback__
    while link is not None:
        if str(link.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _PICKLES:
            return error  # code of the user has raised it
        link = link.tb_next
    return None


def offending_attribute(thing: object, fails: Callable[[object], Exception | None]) -> str | None:
    """Return how a class or function calls the part of it that cannot be encoded, or None if none fails by itself."""
    for name, part in list(getattr(thing, "__dict__", {}).items()):
        if name not in _STAYING and fails(part) is not None:
            function = getattr(part, "__wrapped__", part)  # of an endpoint, a static method
            inside = next((step for step, value in _captures(function) if fails(value) is not None), "")
            return f"its attribute {name!r}{inside}"
    return next((f"its{step.removeprefix(',')}" for step, part in _captures(thing) if fails(part) is not None), None)


def _captures(function: object) -> Iterator[tuple[str, Any]]:
    """Yield the defaults and the closure of a function with the words that lead to each."""
    for default in getattr(function, "__defaults__", None) or ():
        yield f", default {_name(default)}", default
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield f", closure's {name!r}", cell.cell_contents
        except ValueError:  # not filled yet
            continue


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
    elif isinstance(value, FunctionType):
        yield from _captures(value)
    if not _says_itself(whole):
        yield from _attributes(whole)


def _says_itself(value: object) -> bool:
    """Return whether the class of a value says itself why it does not travel."""
    return isinstance(type(value).__reduce_ex__, FunctionType)


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
