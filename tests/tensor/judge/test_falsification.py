"""Wrong rules that are planted in the ranks are found by random programs."""

from __future__ import annotations

import argparse

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.judge.__main__ import falsify  # noqa: E402 - after the skip
from tests.tensor.judge.falsification import FALSIFIED, PROGRAMS_MOST  # noqa: E402
from tests.tensor.judge.table import LINES  # noqa: E402

pytestmark = pytest.mark.torch


def test_ten_rules_are_falsified_and_lines_of_the_table_use_each() -> None:
    import re

    assert len(FALSIFIED) >= 10
    for wrong in FALSIFIED.values():
        assert any(re.search(wrong.lines, line) for line in LINES)


@pytest.mark.real
@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FALSIFIED)
def test_a_falsified_rule_is_found(name: str) -> None:
    options = argparse.Namespace(falsify=name, first_seed=0, programs=PROGRAMS_MOST, seconds=3000.0, mesh="", lines="")
    assert trio.run(falsify, options) == 0
