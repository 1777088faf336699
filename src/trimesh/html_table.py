"""Tables of HTML, as notebooks show values: escaped, with a bound on rows and on the length of a cell."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

ROWS_MAX: Final = 64
"""Maximum rows of a table; further ones are only counted, because a notebook stores its output in its file."""

CELL_CHARS_MAX: Final = 200
"""Maximum characters of a cell, a result or an error; the rest is cut off."""

_LEFT: Final = ' style="text-align:left;padding:2px 8px"'
"""Jupyter aligns cells to the right, which makes texts hard to read; marimo sets them side by side without a gap."""


class ErrorCell(str):
    """Text of a cell that shows an error: it gets a sign in front."""

    __slots__ = ()


def table(head: Iterable[object], rows: Iterable[Iterable[object]], count: int, caption: str = "") -> str:
    """Return a table.

    Args:
        head: Names of the columns.
        rows: Cells of each row, which become text by `str`. No more than `ROWS_MAX` are taken.
        count: Number of all rows; the last line counts those that are not shown.
        caption: Text above the table.
    """
    columns = list(head)
    title = f"<caption{_LEFT}>{_escaped(caption)}</caption>" if caption else ""
    names = "".join(f"<th{_LEFT}>{_escaped(name)}</th>" for name in columns)
    shown = ["".join(f"<td{_LEFT}>{_cell(cell)}</td>" for cell in row) for row in islice(rows, ROWS_MAX)]
    if count > len(shown):
        shown.append(f'<td colspan="{len(columns)}"{_LEFT}>... {count - len(shown)} more</td>')
    body = "".join(f"<tr>{row}</tr>" for row in shown)
    return f"<table>{title}<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: object) -> str:
    sign = '<b style="color:#e0405a">✗</b> ' if isinstance(cell, ErrorCell) else ""
    return sign + _escaped(cell)


def _escaped(cell: object) -> str:
    import html  # noqa: PLC0415 - only notebooks show tables, and it is two modules

    text = str(cell)
    return html.escape(text if len(text) <= CELL_CHARS_MAX else f"{text[:CELL_CHARS_MAX]} ...")
