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

EXPECTED: Final[tuple[Known, ...]] = ()
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
