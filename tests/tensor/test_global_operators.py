"""Operators of torch compute on global tensors, cut where they can be, what they compute here, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.rows import rows

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.operator_comparison import MAKING, check, run_all  # noqa: E402 - after the skip
from tests.tensor.operator_table import CASES  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]

RUNS = [(name, "global") for name in CASES if name not in MAKING]


@pytest.fixture(scope="module")
def everything() -> Any:
    """All cases on one mesh: a mesh for each would take minutes."""
    return trio.run(run_all, RUNS)


@pytest.mark.daily
@rows(("name", "way"), RUNS)
def test_operators_compute_on_global_tensors_what_they_compute_here(everything: Any, name: str, way: str) -> None:
    check(name, way, everything[0][name, way])
