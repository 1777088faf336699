"""A pytest plugin that writes the outcome of each test as a line of JSON, at once: a run may be cut at any moment."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

FILE = "TRIMESH_CUDA_OUTCOMES"
"""Names the file in the environment."""


def write(line: dict[str, Any]) -> None:
    """Append one line."""
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps({**line, "at": time.time()}) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs now."""
    write({"test": nodeid, "outcome": "running"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what came of a phase of a test, unless it is that a fixture has worked."""
    if report.when != "call" and report.passed:
        return
    write(
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "phase": report.when,
            "seconds": round(report.duration, 2),
            "text": reason_of(report),
            "captured": [list(section) for section in report.sections] if report.failed else [],
        }
    )


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Say that a test is over, clean-up included."""
    write({"test": nodeid, "outcome": "over"})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write why a file could not be collected, or skips all of its tests."""
    if not report.passed:
        write({"test": report.nodeid, "outcome": report.outcome, "phase": "collection", "text": reason_of(report)})


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip, or all that is told of a failure."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext
