"""Two tiers of tests. `make test` runs the daily tier, `make test-all` both; CI runs the daily tier first.

`is_daily` is the rule:

- A test that starts no process is daily, unless it is marked `slow`.
- A test with a back end is daily in simulation, with pickle, and Trio as its own host loop. Its variants are not.
- A test of real processes is daily if it is marked `daily`. One case of each rule of docs/SEMANTICS.md that is about
  the operating system is (`tests/test_conformance_ids.py` checks it), and a few of each room.
- Of a table marked `sampled(n)` one case in n is daily, chosen by its name: the same cases in each run.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

DAILY, REST, ALL = "daily", "rest", "all"

REAL_BACKENDS = frozenset(("real", "proc"))
"""Which variants of a test with a back end `daily` adds, where it names none."""

MODULE_MARKS = re.compile(r"^pytestmark = (?:\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def backend_of(item: pytest.Item) -> str | None:
    """Return the back end of one variant of a test, None of a test that takes none."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = params.get("backend", params.get("mesh_backend_name"))
    return None if found is None else str(found)


def is_daily(item: pytest.Item) -> bool:
    """Return whether an item belongs to the daily tier."""
    backend = backend_of(item)
    for mark in item.iter_markers(DAILY):
        if backend is None or backend in (mark.args or REAL_BACKENDS):
            return True
    sampled = item.get_closest_marker("sampled")
    if sampled is not None:
        return zlib.crc32(item.nodeid.encode()) % sampled.args[0] == 0
    if backend is not None and backend != "sim":
        return False
    return item.get_closest_marker("real") is None and item.get_closest_marker("slow") is None


def has_daily(source: Path) -> bool:
    """Return whether a module of tests may have a daily one. To read its text is cheaper than to import it."""
    text = source.read_text()
    marks = MODULE_MARKS.search(text)
    is_left_out = marks is not None and re.search(r"\bmark\.(?:real|slow)\b", marks[0]) is not None
    return not is_left_out or re.search(r"\bmark\.(?:daily|sampled)\b", text) is not None


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
        (chosen if is_daily(item) == (tier == DAILY) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
