"""The table of operations: its groups, and how often each is drawn."""

from __future__ import annotations

from typing import Final

import msgspec
from tests.tensor.judge.elementwise_table import (
    BINARY,
    CASTS,
    COMPARISONS,
    FACTORIES,
    MAKING,
    POINTWISE,
    RANDOM,
    SCALARS,
)  # fmt: skip
from tests.tensor.judge.reduction_table import CUMULATIVE, NETWORKS, PRODUCTS, REDUCTIONS
from tests.tensor.judge.shape_table import INDICES, REORDERED, VIEWS, WAITING
from tests.tensor.judge.training_table import CROSSINGS, TRANSFORMED
from tests.tensor.judge.writing_table import (
    ASSIGNMENTS,
    BACKWARDS,
    GRADIENTS,
    OLDER_VIEWS,
    RECORDED,
    RESHAPES,
    TRAINING,
    WRITES,
)


class Group(msgspec.Struct, frozen=True):
    """Lines of the table that are drawn alike.

    Attributes:
        name: Of the group.
        lines: The code of each, with places.
        weight: How often it is drawn.
        has_result: Whether its code is an expression.
        own: Where it is drawn: with tensors of one rank each (True), with global ones (False), or with both (None).
        ends: Whether it is drawn near the end of programs only, for what it does to leaves.
    """

    name: str
    lines: tuple[str, ...]
    weight: float
    has_result: bool = True
    own: bool | None = None
    ends: bool = False


GROUPS: Final = (
    Group("pointwise", POINTWISE, 10),
    Group("binary", BINARY, 10),
    Group("scalars", SCALARS, 12),
    Group("comparisons", COMPARISONS, 5),
    Group("casts", CASTS, 4),
    Group("factories", FACTORIES, 4),
    Group("making", MAKING, 4, own=True),
    Group("random", RANDOM, 3),
    Group("views", VIEWS, 16),
    Group("reordered", REORDERED, 8),
    Group("indices", INDICES, 8),
    Group("waiting", WAITING, 4, own=False),
    Group("reductions", REDUCTIONS, 16),
    Group("cumulative", CUMULATIVE, 6),
    Group("products", PRODUCTS, 6),
    Group("networks", NETWORKS, 5),
    Group("writes", WRITES, 10),
    Group("assignments", ASSIGNMENTS, 5, has_result=False),
    Group("reshapes", RESHAPES, 4, has_result=False),
    Group("older views", OLDER_VIEWS, 2),
    Group("gradients", GRADIENTS, 8),
    Group("backwards", BACKWARDS, 1.5, has_result=False, ends=True),
    Group("training", TRAINING, 1, has_result=False, ends=True),
    Group("recorded", RECORDED, 0.4),
    Group("crossings", CROSSINGS, 4, own=False),
    Group("transformed", TRANSFORMED, 5),
)

LINES: Final = frozenset(line for group in GROUPS for line in group.lines)
"""All lines of the table."""
