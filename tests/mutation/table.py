"""The outcomes of mutants, counted for each file and each folder, as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

COLUMNS = ("found", "explained", "survived", "not executed", "at import")


def table_of(outcomes: Mapping[str, Counter[str]], sizes: Mapping[str, int]) -> Iterable[str]:
    """Yield the lines of the table.

    The share is that of the mutants found among those that count: what is explained, and what is executed only while
    modules are imported, does not. Behind it half of its 95 % interval, where not all mutants were tried.

    Args:
        outcomes: How often each outcome came, by file.
        sizes: How many mutants each file has.
    """
    width = max(len(path) for path in outcomes)
    yield f"{'file':{width}}  mutants  tried  {'  '.join(COLUMNS)}  share"
    folders: dict[str, list[str]] = {}
    for path in outcomes:
        folders.setdefault(str(Path(path).parent), []).append(path)
    for folder, paths in folders.items():
        for path in paths:
            yield _line(path, width, [outcomes[path]], sizes[path])
        yield _line(f"= {folder}", width, [outcomes[path] for path in paths], sum(sizes[path] for path in paths))


def _line(name: str, width: int, counters: Sequence[Counter[str]], size: int) -> str:
    total = sum(counters, Counter[str]())
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
