"""Runs tests in copies of a process that has imported and collected all of them: a plugin of pytest.

Without mutants a copy learns which test executes which line, and how long each takes. Then each mutant has a copy,
which plants it and runs the tests of its line, the fastest first, until one fails. Spawners of a copy are forks of it
(`ForkedTemplate`), so lines are counted in the processes of its meshes, and the mutant is in these, too. What was
learnt is kept in `.cache`, for each file of tests, until that changes or a source of the room does.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.mutation import lines
from tests.mutation.lines import Lines
from tests.mutation.mutants import Mutant
from tests.mutation.planting import Functions

PATIENCE_SECONDS: Final = 10.0
"""A mutant may take this long, besides five times what its tests take without it, before it counts as found."""

LEARN_SECONDS: Final = 1_800.0
"""All tests once, while the lines are counted."""

TESTS_SECONDS: Final = 15.0
"""Of the tests that execute a line so many are run, the fastest, as take this long together."""

SOURCE: Final = Path("src").resolve()
KEPT: Final = Path(".cache", "mutation")


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
        self._lines: Final = Lines(paths)
        self._session: Any = None
        self._items: dict[str, pytest.Item] = {}
        self._learnt: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self._executed: dict[str, dict[str, list[int]]] = {}
        self._failed: list[str] = []
        self._functions: dict[str, Functions] = {}
        self._lines.start()

    # ---- of pytest -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests of programs that are executed, in which no mutant is planted."""
        items[:] = [item for item in items if not _executes(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own."""
        for path in self.paths:  # what is imported late would be imported without the mutant
            try:
                importlib.import_module(".".join(Path(path).relative_to(SOURCE).with_suffix("").parts))
            except ImportError as error:
                print(f"{os.path.relpath(path)} cannot be imported here: {error}", flush=True)
        self._lines.stop()
        self.imported = {path: set(executed) for path, executed in self._lines.take().items()}
        self._session = session
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
        """Take the lines of this test."""
        try:
            return (yield)
        finally:
            self._executed[item.nodeid] = self._lines.take()

    # ---- copies --------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Learn seconds and lines of each test, or read what was learnt before."""
        sources = b"".join(Path(path).read_bytes() for path in (lines.__file__, *self.paths))
        by_file: dict[Path, list[str]] = {}
        for name, item in self._items.items():
            by_file.setdefault(item.path, []).append(name)
        kept = {
            path: KEPT / hashlib.sha256(sources + path.read_bytes() + str(path).encode()).hexdigest()
            for path in by_file
        }
        for path, names in by_file.items():
            known = json.loads(kept[path].read_text()) if kept[path].exists() else {}
            self._learnt.update({name: known[name] for name in names if name in known})
        wanted = [name for name in self._items if name not in self._learnt]
        if not wanted:
            return
        learnt = self._learn_of(wanted)
        self._learnt.update(learnt)
        for path in {self._items[name].path for name in wanted}:
            names = by_file[path]
            before = json.loads(kept[path].read_text()) if kept[path].exists() else {}
            kept[path].write_text(json.dumps({**before, **{name: self._learnt[name] for name in names}}))

    def _learn_of(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        KEPT.mkdir(parents=True, exist_ok=True)
        said = KEPT.resolve() / f"{os.getpid()}"  # a temporary folder would be removed by the first worker that ends

        def learn() -> bool:
            self._lines.start()
            self._run(wanted, is_patient=True)
            self._lines.stop()
            said.write_text(json.dumps([self._seconds, self._failed, self._executed]))
            return True

        if not _in_copy(learn, LEARN_SECONDS):
            raise SystemExit("the tests did not run to their end without a mutant")
        seconds, failed, executed = json.loads(said.read_text())
        said.unlink()
        learnt: dict[str, dict[str, Any]] = {
            name: {"seconds": seconds.get(name, 0.0), "failed": name in failed, "lines": executed.get(name, {})}
            for name in wanted
        }
        if failed:
            print(f"without a mutant these fail, and are left out: {' '.join(failed)}", flush=True)
        return learnt

    def _run(self, tests: Sequence[str], *, is_patient: bool = False) -> bool:
        """Run some tests; return whether all passed, at once when one has not unless `is_patient`."""
        items = [self._items[test] for test in tests]
        self._session.items[:] = items  # templates are made for these alone
        for plugin in self._session.config.pluginmanager.get_plugins():
            if hasattr(plugin, "spawner_templates"):
                plugin.SpawnerTemplate = lambda env, modules: _template()
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed and not is_patient:
                return False
        return True

    def choose(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line, the fastest first."""
        known = [test for test, learnt in self._learnt.items() if test in self._items and not learnt["failed"]]
        tests = [test for test in known if line in self._learnt[test]["lines"].get(path, ())]
        return self._within_seconds(sorted(tests, key=self._seconds_of))

    def _within_seconds(self, tests: Sequence[str]) -> list[str]:
        left, chosen = TESTS_SECONDS, list[str]()
        for test in tests:
            left -= self._seconds_of(test)
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen

    def _seconds_of(self, test: str) -> float:
        seconds: float = self._learnt[test]["seconds"]
        return seconds

    def try_one(self, path: str, mutant: Mutant) -> str:
        """Return what comes of a mutant: "found", "survived", "not executed", or "at import" only.

        What cannot be planted counts as executed at import.
        """
        chosen = self.choose(path, mutant.line)
        if not chosen:
            return "at import" if mutant.line in self.imported[path] else "not executed"
        source = mutant.source
        if not _in_copy(lambda: self._functions[path].plant(source), PATIENCE_SECONDS):
            return "at import"

        def run() -> bool:
            return self._functions[path].plant(source) and self._run(chosen)

        patience = PATIENCE_SECONDS + 5 * sum(map(self._seconds_of, chosen))
        return "survived" if _in_copy(run, patience) else "found"


def _template() -> object:
    """Return a fork of this process, in place of a template that `tests/conftest.py` makes."""
    from tests.spawner_template import ForkedTemplate  # not before lines of trimesh are counted, which it imports

    return ForkedTemplate()


def _executes(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    module = getattr(item, "module", None)
    runs_scripts = "run_program" in fixtures or hasattr(module, "Program") or hasattr(module, "open_script")
    is_real = item.get_closest_marker("real") is not None
    return item.get_closest_marker("executed") is not None or (is_real and runs_scripts)


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
