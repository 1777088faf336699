"""Errors for names that handles and actor classes do not have: misspelt ones, and those of other libraries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from trimesh.plain_numbers import suggestion

_UNEXPECTED: Final = re.compile(r"got an unexpected keyword argument '(?P<name>\w+)'$")
"""What Python says up to 3.12; since then it has a suggestion itself, where a name is near."""

_VERBS: Final = (
    "call", "call_one", "call_settled", "call_reduced", "choose", "broadcast", "broadcast_nowait", "stream", "map",
    "options",
)  # fmt: skip

_ELSEWHERE: Final = frozenset(("get", "remote", "result", "rref", "submit"))
"""Names of endpoints, tasks and futures in Ray, Monarch and `concurrent.futures`."""


def no_attribute(cls: type, name: str) -> AttributeError:
    """Return the error for what actor classes have in Ray, and not here."""
    return AttributeError(
        f"an actor class has no {name!r}: write `await procs.spawn('name', {cls.__name__}, ...)`, in a block "
        "`async with this_host().spawn_procs(...) as procs:`",
        name=name,
    )


def no_endpoint(cls: type, name: str, known: Iterable[str], attributes: Iterable[str]) -> AttributeError:
    """Return the error for an endpoint that a mesh of `cls` does not have.

    Args:
        cls: The actor class.
        name: What was written.
        known: Endpoints of the class.
        attributes: Other names that a mesh has.
    """
    if inspect.isfunction(getattr(cls, name, None)):
        text = f"{cls.__qualname__}.{name} is no endpoint: write @endpoint above its `def` to call it on a mesh"
    else:
        near = suggestion(name, [*known, *attributes])
        names = ", ".join(sorted(known)) or "none"
        text = f"{cls.__qualname__} has no endpoint {name!r}{near}; its endpoints are: {names}"
    return AttributeError(text, name=name)  # without it Python adds a suggestion of its own


def no_verb(endpoint: str, name: str) -> AttributeError:
    """Return the error for a verb that there is not; `endpoint` is what it was written after."""
    if name in _ELSEWHERE:
        text = (
            f"an endpoint has no {name!r}: write `await {endpoint}.call(...)` for all members, .call_one for a mesh of "
            "one, .choose for any one, or .call.start(...) to await later"
        )
    else:
        text = f"an endpoint has no verb {name!r}{suggestion(name, _VERBS)}; its verbs are: {', '.join(_VERBS)}"
    return AttributeError(text, name=name)


def misspelt(function: Callable[..., Any], error: Exception) -> str | None:
    """Return the text for a keyword that a function does not have; None for any other error."""
    is_of_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
    found = _UNEXPECTED.search(str(error)) if is_of_call and isinstance(error, TypeError) else None
    if found is None:
        return None
    keywords = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"{error}{suggestion(found['name'], keywords)}: there are {', '.join(keywords)}"
