"""Programs whose planted bugs measure how soon seeds find something: without the bug they pass."""

from __future__ import annotations

import pytest
from tests.soak.first_failures import Bug, bugs, measure
from tests.soak.wrong_programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_program_passes(name: str) -> None:
    assert PROGRAMS[name].run(0, is_wrong=False).error is None


def test_first_failure_of_each_sequence_is_measured() -> None:
    figures = measure(bugs()["programs: overtaken"], most=50, sequences=3)

    assert len(figures.seeds) == len(figures.seconds) == 3
    assert 1 <= figures.row()["seeds"] < 50


def test_sequence_without_a_failure_counts_all_its_seeds() -> None:
    seeds: list[int] = []
    planted = bugs()["programs: overtaken"].planted

    figures = measure(Bug(planted, seeds.append), most=4, sequences=2)

    assert figures.seeds == [4, 4]
    assert seeds == [0, 1, 2, 3, 10_000, 10_001, 10_002, 10_003]
