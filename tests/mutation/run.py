"""Change source files by machine, one small change at a time, and show which changes no test finds.

    python -m tests.mutation.run src/trimesh/service src/trimesh/aio --sample 25 --seconds 600

Each argument is a room: a folder or a file; `--sample` is drawn over all files of each. The nearest tests
(`tests/mutation/rooms.py`) are imported, collected and run once, to learn which of them execute which line. Then each
mutant has a fork of that process: there its functions get their changed code, in memory and not in the tree, and only
the tests that execute its line are run, the fastest first. A mutant counts as found when one fails, or when they take
far longer than without it. `tests/mutation/explained.toml` lists those that no test can find, or is to find.
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
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.rooms import files_of, nearest, tier_of
from tests.mutation.table import table_of
from tests.mutation.trying import Trying

# What pytest captures would not be seen; assertions are as they are written, which takes less time to import. Of a test
# under seeds the first has to find the mutant.
OPTIONS: Final = (
    *("-qq", "-s", "-n0", "-p", "no:cacheprovider", "--no-header", "--assert=plain"),
    *(
        "--hypothesis-seed=0",
        "--hypothesis-profile=few",
        "--mesh-seeds=1",
        "-m",
        "not stress and not slow and not cuda",
    ),
)


def drawn(room: str, size: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return mutants of a room with their files: a sample, or all if `size` is 0."""
    found = [(name, it) for name in files_of(room) for it in mutants_of(Path(name).read_text(encoding="utf-8"))]
    if not size or len(found) <= size:
        return found
    return random.Random(seed).sample(found, size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants until the time is up; print each survivor, and a table of the shares that were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run")
    parser.add_argument("rooms", nargs="+", help="files or folders")
    parser.add_argument("--tests", nargs="+", help="that are to find them; by default the nearest")
    parser.add_argument("--only", default="", help="of these tests those that pytest's -k takes")
    parser.add_argument("--tier", default="", help="of these tests: daily, rest or all; by default that of the rooms")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the mutants, without what learning takes")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each room; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})  # one process at a time, and forks
    rooms = [os.path.relpath(room) for room in options.rooms]
    sizes = {room: len(drawn(room, 0, 0)) for room in rooms}

    def work(trying: Trying) -> None:
        explained = read_explained()
        outcomes: dict[str, Counter[str]] = {}
        seconds: dict[str, float] = {}
        end = time.monotonic() + options.seconds
        for room in rooms:
            counter = outcomes[room] = Counter()
            start = time.monotonic()
            for name, mutant in drawn(room, options.sample, options.seed):
                if time.monotonic() > end:
                    break
                outcome = trying.try_one(str(Path(name).resolve()), mutant)
                if outcome in ("survived", "not executed"):
                    if (name, mutant.where, mutant.text) in explained:
                        outcome = "explained"
                    else:
                        print(f"{name}:{mutant.line}: {outcome}: in {mutant.where}: {mutant.text}", flush=True)
                counter[outcome] += 1
            seconds[room] = time.monotonic() - start
        print("\n".join(table_of(outcomes, sizes, seconds)), flush=True)

    paths = [str(Path(name).resolve()) for room in rooms for name in files_of(room)]
    tests = options.tests or sorted({test for room in rooms for test in nearest(room)})
    only = ("-k", options.only) if options.only else ()
    tier = options.tier or max(map(tier_of, rooms), key=("daily", "all").index)
    status = pytest.main([*OPTIONS, f"--tier={tier}", *only, *tests], plugins=[Trying(paths, work)])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(status)


if __name__ == "__main__":
    sys.exit(main())
