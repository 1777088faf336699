"""Two tiers of tests. `make test` runs the daily tier, `make test-all` both; CI runs the daily tier first.

`is_daily` is the rule, for pytest and for what looks at the sources alone:

- A test that starts no process is daily, unless it is marked `slow`.
- A test with a back end is daily in simulation, with pickle, and Trio as its own host loop. Its variants are not.
- A test of real processes is daily if it is marked `daily`. One case of each rule of docs/SEMANTICS.md that is about
  the operating system is (`tests/test_conformance_ids.py` checks it), and a few of each room.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

DAILY, REST, ALL = "daily", "rest", "all"

Marks = Collection[tuple[str, tuple[Any, ...]]]
"""Marks of a test: name and arguments."""

REAL_BACKENDS = frozenset(("real", "proc"))
"""Which variants of a test with a back end `daily` adds, where it names none."""

MODULE_MARKS = re.compile(r"^pytestmark = (?:\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def backend_of(item: pytest.Item) -> str | None:
    """Return the back end of one variant of a test, None of a test that takes none."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = params.get("backend", params.get("mesh_backend_name"))
    return None if found is None else str(found)


def is_daily(marks: Marks, backend: str | None) -> bool:
    """Return whether a test belongs to the daily tier, on one of its back ends if it has some."""
    if any(name == DAILY and (backend is None or backend in (args or REAL_BACKENDS)) for name, args in marks):
        return True
    return backend in (None, "sim") and not {"real", "slow"} & {name for name, _ in marks}


def marks_in(*trees: ast.AST) -> Marks:
    """Return the marks that syntax trees name."""
    found: dict[ast.AST, tuple[str, tuple[Any, ...]]] = {}
    for node in (inner for tree in trees for inner in ast.walk(tree)):  # a call comes before the mark that it calls
        args = [one.value for one in node.args if isinstance(one, ast.Constant)] if isinstance(node, ast.Call) else []
        mark = node.func if isinstance(node, ast.Call) else node
        if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == "pytest.mark":
            found.setdefault(mark, (mark.attr, tuple(args)))
    return list(found.values())


def has_daily(source: Path) -> bool:
    """Return whether a module of tests may have a daily one. To read its text is cheaper than to import it."""
    text = source.read_text()
    marks = MODULE_MARKS.search(text)
    is_left_out = marks is not None and re.search(r"\bmark\.(?:real|slow)\b", marks[0]) is not None
    return not is_left_out or re.search(r"\bmark\.daily\b", text) is not None


# ---- hooks -----------------------------------------------------------------------------------------------------------


def add_option(parser: pytest.Parser) -> None:
    """Add the option `--tier`."""
    parser.addoption("--tier", choices=(DAILY, REST, ALL), default=ALL, help="which tests; tests/tiers.py has the rule")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a daily test, if those are wanted."""
    if config.getoption("--tier") != DAILY or not collection_path.match("test_*.py"):
        return None
    return None if has_daily(collection_path) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items of the other tier."""
    tier = config.getoption("--tier")
    if tier == ALL:
        return
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        marks = [(mark.name, mark.args) for mark in item.iter_markers()]
        (chosen if is_daily(marks, backend_of(item)) == (tier == DAILY) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
