"""Numbers that users give: those of other libraries are numbers, too."""

from __future__ import annotations

import decimal
import fractions
import importlib
import math
from typing import Any

import pytest
from tests.rows import rows

import trimesh
from trimesh import Backoff, Restart, Retry
from trimesh.actor.options import check_window
from trimesh.actor.spawning import checked_grace, checked_seed
from trimesh.plain_numbers import plain_real, plain_whole, real_number, whole_number

np: Any
try:
    import numpy as np  # here: it starts threads
except ModuleNotFoundError:
    np = None


class Two:
    """Is an index."""

    def __index__(self) -> int:
        return 2


class Refusing:
    """Has the method, and refuses."""

    def __index__(self) -> int:
        raise TypeError


@rows(
    ("value", "found"), [(3, 3), (Two(), 2), (True, None), (2.0, None), ("2", None), (None, None), (Refusing(), None)]
)
def test_whole_numbers(value: Any, found: int | None) -> None:
    assert whole_number(value) == found
    assert plain_whole(value) is (value if found is None else found)


@rows(
    ("value", "found"),
    [
        (3, 3.0), (Two(), 2.0), (0.5, 0.5), (fractions.Fraction(1, 2), 0.5), (decimal.Decimal("0.5"), 0.5),
        (math.inf, math.inf), (False, None), ("2", None), (None, None), ([1], None), (10**400, None),
    ],
)  # fmt: skip
def test_real_numbers(value: Any, found: float | None) -> None:
    assert real_number(value) == found
    assert plain_real(value) == (value if found is None else found)


def test_numbers_of_numpy() -> None:
    if np is None:
        pytest.skip("these are values of numpy, which is no dependency")
    for two in (np.int64(2), np.uint8(2), np.array(2)):
        assert type(whole_number(two)) is int
    for half in (np.float32(0.5), np.float64(0.5)):
        assert type(real_number(half)) is float
    for other in (np.True_, np.array([1, 2]), np.array(["a"])):
        assert whole_number(other) is None
        assert real_number(other) is None


def test_numbers_are_taken_everywhere() -> None:
    """As Python's own: they are sent, and compared by type."""
    two: Any = Two()
    found = [
        Retry(two).max,
        Restart(intensity=two).intensity,
        check_window(two),
        checked_seed(two),
        importlib.import_module("trimesh.jobs.job").checked_hosts(two),
    ]
    assert [(type(one), one) for one in found] == [(int, 2)] * len(found)
    amounts = [
        Retry(1, backoff=two).backoff,
        Backoff(two).initial,
        Restart(period=two).period,
        checked_grace(two),
    ]
    assert [(type(one), one) for one in amounts] == [(float, 2.0)] * len(amounts)
    with trimesh.configured(grace=two, map_window=two) as settings:
        assert (settings.grace, type(settings.map_window)) == (2.0, int)
