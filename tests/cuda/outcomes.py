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
    is_skipped = report.skipped and isinstance(report.longrepr, tuple)
    text = str(report.longrepr[2]) if is_skipped and isinstance(report.longrepr, tuple) else report.longreprtext
    write(
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "phase": report.when,
            "seconds": round(report.duration, 2),
            "text": text,
            "captured": [list(section) for section in report.sections] if report.failed else [],
        }
    )


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Say that a test is over, clean-up included."""
    write({"test": nodeid, "outcome": "over"})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write why a file could not be collected."""
    if report.failed:
        write({"test": report.nodeid, "outcome": "failed", "phase": "collection", "text": report.longreprtext})
