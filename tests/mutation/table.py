"""The outcomes of mutants, counted for each room, as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

COLUMNS = ("found", "explained", "survived", "not executed", "at import")


def table_of(
    outcomes: Mapping[str, Counter[str]], sizes: Mapping[str, int], seconds: Mapping[str, float]
) -> Iterable[str]:
    """Yield the lines of the table.

    The share is that of the mutants found among those that count: what is explained, and what is executed only while
    modules are imported, does not. Behind it half of its 95 % interval, where not all mutants were tried.

    Args:
        outcomes: How often each outcome came, by room: a file or a folder.
        sizes: How many mutants each room has.
        seconds: How long trying them took.
    """
    width = max(len(path) for path in outcomes)
    yield f"{'room':{width}}  mutants  tried  {'  '.join(COLUMNS)}  share"
    for room, counter in outcomes.items():
        yield f"{_line(room, width, counter, sizes[room])}  {seconds[room]:.0f} s"


def _line(name: str, width: int, total: Counter[str], size: int) -> str:
    tried = total.total()
    counted = total["found"] + total["survived"] + total["not executed"]
    share = total["found"] / counted if counted else 1.0
    numbers = "  ".join(f"{total[column]:{len(column)}}" for column in COLUMNS)
    return f"{name:{width}}  {size:7}  {tried:5}  {numbers}  {100 * share:5.1f} %{_error(share, counted, tried, size)}"


def _error(share: float, counted: int, tried: int, size: int) -> str:
    if tried >= size or not counted:
        return ""
    # Wilson's interval, which is not empty where all or none were found, for a sample without repetition.
    z = 1.96 * math.sqrt((size - tried) / max(1, size - 1))
    half = z / (1 + z * z / counted) * math.sqrt(share * (1 - share) / counted + z * z / (4 * counted * counted))
    return f" +- {100 * half:.1f}"
