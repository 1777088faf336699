"""Modules that `make test` does not import have no daily test."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.tiers import has_daily

TESTS = Path(__file__).parent


def marks_of(source: Path) -> tuple[set[str], set[str]]:
    """Return the marks of a module, and all marks that it names, as its syntax tree has them."""
    tree = ast.parse(source.read_text())
    of_module = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    return names_in(*of_module), names_in(tree)


def names_in(*trees: ast.AST) -> set[str]:
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Attribute) and node.value.attr == "mark"}


def test_modules_without_a_daily_test_are_those_of_real_or_slow_ones() -> None:
    left_out = [source for source in TESTS.rglob("test_*.py") if not has_daily(source)]
    assert len(left_out) > 50
    for source in left_out:
        of_module, named = marks_of(source)
        assert of_module & {"real", "slow"}, source
        assert not named & {"daily", "sampled"}, source
