"""Environment variables that users give for processes, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def checked_variables(given: Any, what: str) -> dict[str, str]:
    """Return variables of an environment; none for None.

    Args:
        given: By the user.
        what: Its name in errors.

    Raises:
        TypeError: It is no mapping, or a name or a value is no text.
        ValueError: A name or a value cannot be in an environment.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping of names to texts, got {given!r}")
    found: dict[str, str] = {}
    items: Any = given.items()
    for name, value in items:
        if not isinstance(name, str):
            raise TypeError(f"the names of {what} must be strings, got {name!r}")
        if not isinstance(value, str | bytes | os.PathLike):
            text = f"{name!r}: {str(value)!r}"
            raise TypeError(f"the values of {what} must be strings, got {name}={value!r}: write {text}")
        text = os.fsdecode(value)
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise ValueError(f"{what} must have names without '=' and no NUL characters, got {name!r}: {text!r}")
        found[name] = text
    return found
