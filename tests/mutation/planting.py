"""Plugins of pytest: one plants a mutant before anything of trimesh is imported, one learns which test runs what."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage
import pytest


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module whose file has a mutant."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.origin != self.path:
            return None
        found.loader = _Loader(name, self.path, self.source)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes other source than that of the file, and keeps nothing of it."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Planting:
    """Plants a mutant in the process that is to run the tests."""

    def __init__(self, path: str, source: str) -> None:
        self.finder = _Finder(path, source)

    def begin(self) -> None:
        """Plant it, before anything of trimesh is imported."""
        sys.meta_path.insert(0, self.finder)


class Timing:
    """Learns which lines each test executes, and how long it takes.

    Args:
        data: The file for the lines.
        seconds: The file for the seconds.
        sources: The files that are looked at.
    """

    def __init__(self, data: str, seconds: str, sources: Sequence[str]) -> None:
        self.data = data
        self.seconds_path = seconds
        self.sources = sources
        self.seconds: dict[str, float] = {}
        self.coverage: Any = None

    def begin(self) -> None:
        """Begin, before anything of trimesh is imported."""
        self.coverage = coverage.Coverage(data_file=self.data, include=list(self.sources), config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count what is executed for this test."""
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the phases of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write it all down."""
        self.coverage.stop()
        self.coverage.save()
        Path(self.seconds_path).write_text(json.dumps(self.seconds))

    def read(self) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
        """Return what was written by another process."""
        data = coverage.CoverageData(self.data)
        data.read()
        lines = {
            path: {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(path).items()}
            for path in data.measured_files()
        }
        return lines, json.loads(Path(self.seconds_path).read_text())
