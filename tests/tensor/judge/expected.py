"""Failures that are known: what the engine computes wrong today, with the cause of each. It is to be empty."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from tests.tensor.judge.session import Verdict


class Known(msgspec.Struct, frozen=True):
    """A cause of failures in random programs.

    Attributes:
        cause: In words.
        code: A pattern of the line of the table by which it shows.
        kinds: Kinds of findings that it shows as.
    """

    cause: str
    code: str
    kinds: tuple[str, ...] = ("value", "gradient")


ANY: Final = ("value", "gradient", "error", "dtype", "stride", "shape", "none", "requires_grad")

EXPECTED: Final[tuple[Known, ...]] = (
    Known("a negative dimension is taken for another by a running sum or product", r"cum(sum|prod)|logcumsumexp"),
    Known("any() counts ranks", r"any\("),
    Known("a new tensor like one in parts is in parts", r"new_ones|new_full|new_tensor|new_empty|empty_like"),
    Known("a tensor in parts is divided by, filled or written to", r"div|/|fill|constant_|ones_|_\("),
    Known("a gather or scatter with a smaller index", r"gather|scatter|take"),
    Known("a mask of a tensor that is cut by columns", r"\{mask\}\]|\{rowmask\}\]|masked_select", ANY),
    Known("a view of a view is permuted", r"view|flatten|reshape"),
    Known("NaN of another rank is lost", r"max|min|norm|clip_grad"),
    Known("the output of a table cut by rows", r"embedding", ANY),
    Known("counts that are added up are floats", r"sum\(", ("error", "dtype")),
    Known("a tensor made of a mask or of numbers on the way is of this process", r"maximum|minimum", ("error",)),
    Known("random numbers are not those of one process", r"rand|normal|dropout|uniform|bernoulli|exponential"),
)
"""Of random programs."""

FAILING: Final[frozenset[str]] = frozenset()
"""Of the programs in `listed`: those that fail today, by name."""


def cause_of(verdict: Verdict) -> str | None:
    """Return the cause of a failure that is known, or None."""
    for one in EXPECTED:
        for finding in verdict.findings:
            if finding.kind in one.kinds and re.search(one.code, finding.operation):
                return one.cause
    return None
