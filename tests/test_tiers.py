"""Modules that `make test` does not import have no daily test."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.tiers import has_daily, marks_in

TESTS = Path(__file__).parent


def test_modules_without_a_daily_test_are_those_of_real_or_slow_ones() -> None:
    left_out = [source for source in TESTS.rglob("test_*.py") if not has_daily(source)]
    assert len(left_out) > 50
    for source in left_out:
        tree = ast.parse(source.read_text())
        of_module = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        assert {name for name, _ in marks_in(*of_module)} & {"real", "slow"}, source
        assert "daily" not in {name for name, _ in marks_in(tree)}, source
