"""Change source files by machine, one small change at a time, and show which changes no test finds.

    python -m tests.mutation.run src/trimesh/_routing/credit.py --seconds 600 --sample 100

The tests are run once, to learn which of them execute which line. Then each mutant is planted in a forked process, by
an import hook and not in the tree, and only the tests that execute its line are run, the fastest first. A mutant counts
as found when one fails, or when they take far longer than without it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import pytest
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.planting import Planting, Timing

PRELOADED: Final = ("coverage", "msgspec", "trio", "trio.testing")
"""What each process would import. Nothing of trimesh, which a mutant may be in, and no plugin of pytest, which wants to
import those itself."""

PATIENCE_SECONDS: Final = 10.0
"""A mutant may take this long, besides ten times what its tests take without it and five times what pytest takes to
begin, before it counts as found."""

TESTS_MAX: Final = 60
"""Of the tests that execute a line so many are run, the fastest."""

# Assertions are as they are written: what rewrites them imports trimesh's modules itself, and no mutant.
OPTIONS: Final = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header", "--assert=plain")


def run_forked(arguments: Sequence[str], plugin: Planting | Timing, seconds: float) -> int | None:
    """Run pytest in a process of its own, without its output; return the exit status, or None past the time."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        status = 3
        try:
            plugin.begin()
            status = int(pytest.main([*OPTIONS, *arguments], plugins=[plugin]))
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@attrs.frozen
class Tests:
    """Which tests execute which lines, and how long each takes.

    Attributes:
        of_line: The tests of each line of each file.
        seconds: What each test takes.
        start: What pytest takes besides.
    """

    of_line: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    start: float

    def choose(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line, the fastest first."""
        found = self.of_line.get(path, {}).get(line, [])
        return sorted(found, key=lambda test: self.seconds.get(test, 0.0))[:TESTS_MAX]


def learn(paths: Sequence[str], tests: Sequence[str], seconds: float) -> Tests:
    """Run all tests once; raise `SystemExit` if one fails without any mutant."""
    with tempfile.TemporaryDirectory() as folder:
        timing = Timing(str(Path(folder, "coverage")), str(Path(folder, "seconds")), paths)
        begin = time.monotonic()
        status = run_forked(tests, timing, seconds)
        if status != 0:
            raise SystemExit(f"the tests must pass without a mutant, got status {status}: pytest {' '.join(tests)}")
        of_line, of_test = timing.read()
        return Tests(of_line, of_test, max(0.0, time.monotonic() - begin - sum(of_test.values())))


def folder_of(path: str) -> str:
    """Return the folder of the tests of a package."""
    found = Path("tests", Path(path).parent.name.removeprefix("_"))
    if not found.is_dir():
        raise SystemExit(f"{path} has no folder of tests of its own, {found}: name the tests by --tests")
    return str(found)


def try_one(path: str, mutant: Mutant, tests: Tests) -> str:
    """Return what comes of a mutant: "found", "survived", "not executed" or "too slow"."""
    chosen = tests.choose(path, mutant.line)
    if not chosen:
        return "not executed"
    patience = PATIENCE_SECONDS + 5 * tests.start + 10 * sum(tests.seconds.get(test, 0.0) for test in chosen)
    status = run_forked(chosen, Planting(path, mutant.source), patience)
    return "too slow" if status is None else "survived" if status == 0 else "found"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants until the time is up; print each survivor, and the share that was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tests", nargs="+", help="that are to find them; by default the folder of the package")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each file; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(arguments)
    for name in PRELOADED:
        importlib.import_module(name)
    end = time.monotonic() + options.seconds
    paths = [str(Path(path).resolve()) for path in options.files]
    tests = learn(paths, options.tests or sorted({folder_of(path) for path in paths}), options.seconds)
    tried = found = left = 0
    for path in paths:
        mutants = list(mutants_of(Path(path).read_text()))
        if options.sample and len(mutants) > options.sample:
            mutants = random.Random(options.seed).sample(mutants, options.sample)
        outcomes: dict[str, int] = dict.fromkeys(("found", "survived", "not executed", "too slow"), 0)
        for mutant in mutants:
            if time.monotonic() > end:
                left += 1
                continue
            outcome = try_one(path, mutant, tests)
            outcomes[outcome] += 1
            if outcome in ("survived", "not executed"):
                print(f"{os.path.relpath(path)}:{mutant.line}: {outcome}: {mutant.text}", flush=True)
        here = sum(outcomes.values())
        killed = outcomes["found"] + outcomes["too slow"]
        tried, found = tried + here, found + killed
        print(f"{os.path.relpath(path)}: {killed} of {here} found, {outcomes}", flush=True)
    share = 100 * found / tried if tried else 100.0
    print(f"{found} of {tried} mutants found, {share:.1f} %; {left} not tried, for the time was up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
