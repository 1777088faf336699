"""Operations of ours on the ranks, beside those of torch: a table that the files of this package put theirs into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs

F = TypeVar("F", bound=Callable[..., Any])


@attrs.frozen
class Kernel:
    """One operation.

    Attributes:
        name: In the table; commands call it "trimesh::name".
        function: Takes the `Rank`, the `TeamOnRank` of the command, then its arguments.
        takes_poison: Whether it is called although an argument is a `Poison`; else its outputs are one, too.
        operator: The operator of torch that it stands for, if it does.
    """

    name: str
    function: Callable[..., Any]
    takes_poison: bool
    operator: Callable[..., Any] | None = None


KERNELS: Final[dict[str, Kernel]] = {}

FAMILIES: Final[dict[str, Callable[[str, Callable[..., Any]], Kernel]]] = {}
"""What makes a kernel of an operator of torch, by the word before its name: "global::aten::add.Tensor"."""


def kernel(name: str, *, takes_poison: bool = False) -> Callable[[F], F]:
    """Put a function into the table."""

    def put(function: F) -> F:
        KERNELS[name] = Kernel(name, function, takes_poison)
        return function

    return put
