"""Suggestions for misspelt names, for the texts of errors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])

_UNEXPECTED: Final = re.compile(r"got an unexpected keyword argument '(?P<name>\w+)'$")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (is it gpus?)" for the known name that is nearest to one that is none; empty if none is near."""
    import difflib  # noqa: PLC0415 - only wrong names need it

    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f" (is it {by_lower[near[0]]}?)" if near else ""


def suggests_keywords(function: _F) -> _F:
    """Decorate a function of many keywords: for a misspelt one, the `TypeError` has the nearest name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # of the function itself
            text = str(error)
        found = _UNEXPECTED.search(text)  # from Python 3.13 on the text has a suggestion of its own
        if found is not None:
            keywords = [name for name in inspect.signature(function).parameters if name != "self"]
            text += f"{suggestion(found['name'], keywords)}: there are {', '.join(keywords)}"
        raise TypeError(text) from None

    return cast("_F", call)
