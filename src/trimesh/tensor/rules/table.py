"""Table of rules for operators on parts of global tensors. Operators without a row fall back to whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trimesh.tensor.rules.call import Row
from trimesh.tensor.rules.composed import COMPOSED
from trimesh.tensor.rules.operators import dimension, index, matmul, network, pointwise, reduction, view

ROWS: Final[Sequence[Row]] = (
    *pointwise.ROWS,
    *reduction.ROWS,
    *matmul.ROWS,
    *matmul.ROWS_LINEAR,
    *dimension.ROWS,
    *network.ROWS_ATTENTION,
    *network.ROWS,
    *view.ROWS,
    *index.ROWS,
    *pointwise.ROWS_FACTORY,
    *pointwise.ROWS_LISTED,
)

_BY_NAME: Final[dict[str, list[Row]]] = {}
for _row in ROWS:
    for _name in _row.names:
        _BY_NAME.setdefault(_name, []).append(_row)


def rows_of(name: str) -> Sequence[Row]:
    """Return the rows of an operator, by its name without overload."""
    return _BY_NAME.get(name, ())


BEGIN: Final = "<!-- the table of rules: python -m trimesh.tensor.rules docs/reference/tensor-operators.md -->"
END: Final = "<!-- its end -->"


def written_into(document: str) -> str:
    """Return a document with the text between its marks replaced by the table."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines(), "", END + after])


def lines() -> Iterator[str]:
    yield "| kind | operators | dimensions that may be cut | partial sums |"
    yield "|---|---|---|---|"
    for row in ROWS:
        names = " ".join(f"`{name}`" for name in sorted(row.names))
        yield f"| {row.kind} | {names} | {row.cut} | {row.sums} |"
    names = " ".join(f"`{name}`" for name in sorted(COMPOSED))
    yield f"| composed of these | {names} | as these | as these |"
