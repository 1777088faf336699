"""Conversion of users' numbers to Python's own: numpy's count as numbers, truth values and texts do not.

Messages, sizes and loops use only `int` and `float`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex


def whole_number(value: object) -> int | None:
    """Return a whole number, also one of numpy, as an int; for a bool and anything else None."""
    if type(value) is int:  # the common case; the protocol below costs 10 us to look up
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:  # an array has the method and refuses
            return None
    return None


def real_number(value: object) -> float | None:
    """Return a number, also one of numpy, a decimal or a fraction, as a float; for anything else None."""
    if type(value) is float:
        return value
    found = whole_number(value)
    if found is None and (isinstance(value, bool) or not hasattr(value, "as_integer_ratio")):
        return None
    try:
        number: Any = value if found is None else found
        return float(number)
    except (OverflowError, TypeError, ValueError):
        return None


def positive_real(value: object) -> float | None:
    """Return a finite number above 0 as a float; for anything else None."""
    found = real_number(value)
    return found if found is not None and 0 < found < math.inf else None


def plain_whole(value: Any) -> Any:
    """Return a whole number as an int, and any other value unchanged, for a later check to refuse."""
    found = whole_number(value)
    return value if found is None else found


def plain_real(value: Any) -> Any:
    """Return a number as Python's own, and any other value unchanged, for a later check to refuse."""
    if type(value) is int:
        return value
    found = real_number(value)
    return value if found is None else found


# ---- suggestions for misspelt names, for the texts of errors ---------------------------------------------------------


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (is it gpus?)" with the known name nearest to a wrong one; an empty text if none is near."""
    import difflib  # noqa: PLC0415 - only wrong names need it

    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f" (is it {by_lower[near[0]]}?)" if near else ""
