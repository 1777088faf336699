"""Change source files by machine, one small change at a time, and show which changes no test finds.

    python -m tests.mutation.run src/trimesh/_routing/collector.py --seconds 600 --sample 100

The tests are imported, collected and run once, to learn which of them execute which line. Then each mutant has a fork
of that process: there its functions get their changed code, in memory and not in the tree, and only the tests that
execute its line are run, the fastest first. A mutant counts as found when one fails, or when they take far longer than
without it. `tests/mutation/explained.toml` lists those that no test can find, or is to find.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from tests.mutation.explained import read_explained
from tests.mutation.mutants import mutants_of
from tests.mutation.table import table_of
from tests.mutation.trying import Trying

# What pytest captures would not be seen; assertions are as they are written, which takes less time to import.
OPTIONS: Final = ("-qq", "-s", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header", "--assert=plain")


def folder_of(path: str) -> str:
    """Return the folder of the tests of a package."""
    found = Path("tests", Path(path).parent.name.removeprefix("_"))
    if not found.is_dir():
        raise SystemExit(f"{path} has no folder of tests of its own, {found}: name the tests by --tests")
    return str(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants until the time is up; print each survivor, and a table of the shares that were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tests", nargs="+", help="that are to find them; by default the folder of the package")
    parser.add_argument("--only", default="", help="of these tests those that pytest's -k takes")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each file; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(arguments)
    paths = [str(Path(path).resolve()) for path in options.files]
    end = time.monotonic() + options.seconds

    def work(trying: Trying) -> None:
        explained = read_explained()
        outcomes: dict[str, Counter[str]] = {}
        sizes: dict[str, int] = {}
        for path in paths:
            name = os.path.relpath(path)
            mutants = list(mutants_of(Path(path).read_text(encoding="utf-8")))
            sizes[name] = len(mutants)
            if options.sample and len(mutants) > options.sample:
                mutants = random.Random(options.seed).sample(mutants, options.sample)
            counter = outcomes[name] = Counter()
            for mutant in mutants:
                if time.monotonic() > end:
                    break
                outcome = trying.try_one(path, mutant)
                if outcome in ("survived", "not executed"):
                    if (name, mutant.where, mutant.text) in explained:
                        outcome = "explained"
                    else:
                        print(f"{name}:{mutant.line}: {outcome}: in {mutant.where}: {mutant.text}", flush=True)
                counter[outcome] += 1
        print("\n".join(table_of(outcomes, sizes)), flush=True)

    tests = options.tests or sorted({folder_of(path) for path in paths})
    only = ("-k", options.only) if options.only else ()
    status = pytest.main([*OPTIONS, *only, *tests], plugins=[Trying(paths, work)])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(status)


if __name__ == "__main__":
    sys.exit(main())
