"""One row of the table: some operators, and how they run on parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from trimesh.tensor.rules.call import Chosen, OperatorCall, Strategy

Offer = Callable[[OperatorCall, int], Iterable[Strategy]]
"""The ways to run a call along a dimension of the mesh, beside that with everything whole."""

Localize = Callable[[OperatorCall, Chosen], Callable[..., Any] | None]
"""What a rank calls with its parts, where that is not the operator itself."""


@attrs.frozen(eq=False)
class Row:
    """Operators of one kind.

    Attributes:
        kind: What the table calls them.
        names: Of the operators, without overload; `x` stands for `x_`, too.
        offer: See `Offer`.
        cut: What may be cut, in words.
        sums: What may be parts of a sum, and what becomes one, in words.
        localize: See `Localize`.
        is_view: Whether results share the memory of the first argument.
        numbers_vary: Whether numbers cannot change what the rule says of tensors that are not in parts.
        takes_empty: Whether ranks may have nothing of a tensor.
        may_run: Whether a call is one that the rule is for.
    """

    kind: str
    names: tuple[str, ...]
    offer: Offer
    cut: str
    sums: str = ""
    localize: Localize | None = None
    is_view: bool = False
    numbers_vary: bool = False
    takes_empty: bool = True
    may_run: Callable[[OperatorCall], bool] | None = None


def words(text: str) -> tuple[str, ...]:
    """Return names that are written in one text."""
    return tuple(text.split())
