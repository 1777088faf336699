"""Runs tests in copies of a process that has imported and collected all of them: a plugin of pytest.

Without mutants a copy learns which test executes which line, and how long each takes. Then each mutant has a copy,
which plants it and runs the tests of its line, the fastest first, until one fails.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

import coverage
import pytest
from tests.mutation.mutants import Mutant
from tests.mutation.planting import Functions

PATIENCE_SECONDS: Final = 10.0
"""A mutant may take this long, besides ten times what its tests take without it, before it counts as found."""

LEARN_SECONDS: Final = 1_800.0
"""All tests once, while the lines are counted."""

TESTS_SECONDS: Final = 30.0
"""Of the tests that execute a line so many are run, the fastest, as take this long together."""


class Trying:
    """The plugin.

    Args:
        paths: The files that are changed.
        work: What is done once all tests are collected; it calls `try_one`.
    """

    def __init__(self, paths: Sequence[str], work: Callable[[Trying], None]) -> None:
        self.paths = paths
        self.work = work
        self.imported: dict[str, set[int]] = {}
        self._coverage: Any = coverage.Coverage(data_file=None, include=list(paths), config_file=False)
        self._items: dict[str, pytest.Item] = {}
        self._of_line: dict[str, dict[int, list[str]]] = {}
        self._seconds: dict[str, float] = {}
        self._failed: list[str] = []
        self._functions: dict[str, Functions] = {}
        self._coverage.start()

    # ---- of pytest -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own."""
        self._coverage.stop()
        data = self._coverage.get_data()
        self.imported = {path: set(data.lines(path) or ()) for path in self.paths}
        self._items = {item.nodeid: item for item in session.items}
        self._learn()
        gc.unfreeze()  # what tests/conftest.py has frozen is not found otherwise
        gc.collect()
        self._functions = {path: Functions(path) for path in self.paths}
        gc.freeze()  # the copies share the memory of what is here
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the phases of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count the lines for this test."""
        if self._coverage is not None:
            self._coverage.switch_context(item.nodeid)
        return (yield)

    # ---- copies --------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lines, said = str(Path(folder, "lines")), Path(folder, "said")

            def learn() -> bool:
                self._coverage = coverage.Coverage(data_file=lines, include=list(self.paths), config_file=False)
                self._coverage.start()
                self._run(list(self._items), is_patient=True)
                self._coverage.stop()
                self._coverage.save()
                said.write_text(json.dumps([self._seconds, self._failed]))
                return True

            if not _in_copy(learn, LEARN_SECONDS):
                raise SystemExit("the tests did not run to their end without a mutant")
            data = coverage.CoverageData(lines)
            data.read()
            of_lines = {path: data.contexts_by_lineno(path) for path in self.paths}
            self._seconds, failed = json.loads(said.read_text())
        self._coverage = None
        if failed:
            print(f"without a mutant these fail, and are left out: {' '.join(failed)}", flush=True)
        usable = self._items.keys() - set(failed)
        for path, of_line in of_lines.items():
            self._of_line[path] = {line: [test for test in tests if test in usable] for line, tests in of_line.items()}

    def _run(self, tests: Sequence[str], *, is_patient: bool = False) -> bool:
        """Run some tests; return whether all passed, at once when one has not unless `is_patient`."""
        items = [self._items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed and not is_patient:
                return False
        return True

    def choose(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line, the fastest first."""
        left, chosen = TESTS_SECONDS, list[str]()
        for test in sorted(self._of_line[path].get(line, ()), key=lambda test: self._seconds.get(test, 0.0)):
            left -= self._seconds.get(test, 0.0)
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen

    def try_one(self, path: str, mutant: Mutant) -> str:
        """Return what comes of a mutant: "found", "survived", "not executed", or "at import" only."""
        chosen = self.choose(path, mutant.line)
        if not chosen:
            return "at import" if mutant.line in self.imported[path] else "not executed"

        def run() -> bool:
            self._functions[path].plant(mutant.source)
            return self._run(chosen)

        patience = PATIENCE_SECONDS + 10 * sum(self._seconds.get(test, 0.0) for test in chosen)
        return "survived" if _in_copy(run, patience) else "found"


def _in_copy(work: Callable[[], bool], seconds: float) -> bool:
    """Do something in a fork of this process, without its output; return what it returns, False past the time."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nowhere, descriptor)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
