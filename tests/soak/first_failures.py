"""How soon seeds find planted bugs: seeds and processor time until the first that fails.

    python -m tests.soak.first_failures             every bug; an hour
    python -m tests.soak.first_failures programs    one suite, or bugs whose name has this text
    python -m tests.soak.first_failures --json FILE programs
    python -m tests.soak.first_failures --against FILE programs    ratios to the figures of an earlier run

Each of 20 sequences of seeds begins elsewhere and ends at the first failure, or after `--most` seeds, which then count.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from tests.service import loop_mutations, loop_workload, pool_mutations, pool_workload
from tests.soak import mutations, workload
from tests.soak.wrong_programs import PROGRAMS
from tests.testing import test_oracles
from tests.testing.actors import run_body

SEQUENCES: Final = 20
APART: Final = 10_000
"""Seeds between the beginnings of two sequences."""


@attrs.frozen
class Bug:
    """A planted bug.

    Attributes:
        planted: The bug exists inside of this block.
        run: Runs one seed; returns the error, or None.
    """

    planted: Callable[[], AbstractContextManager[Any]]
    run: Callable[[int], BaseException | None]


@contextmanager
def _patched(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


def _run_oracles(seed: int) -> BaseException | None:
    body: Any = test_oracles.workload
    return run_body(body, seed).error


def bugs() -> dict[str, Bug]:
    """Return all planted bugs by "suite: name"."""
    found: dict[str, Bug] = {}
    for name, program in PROGRAMS.items():
        found[f"programs: {name}"] = Bug(nullcontext, lambda seed, p=program: p.run(seed, is_wrong=True).error)
    for plant, _ in test_oracles.PLANTED:
        found[f"oracles: {plant.__name__}"] = Bug(partial(_patched, plant), _run_oracles)
    for suite, table, module in (
        ("soak", mutations.MUTATIONS, workload),
        ("pool", pool_mutations.MUTATIONS, pool_workload),
        ("loop", loop_mutations.MUTATIONS, loop_workload),
    ):
        for name, mutation in table.items():
            found[f"{suite}: {name}"] = Bug(mutation.planted, lambda seed, m=module: m.run_schedule(seed).error)
    return found


@attrs.frozen
class Figures:
    """Seeds and seconds of processor time of each sequence."""

    seeds: list[int]
    seconds: list[float]

    def row(self) -> dict[str, float]:
        """Return their medians and means."""
        return {
            "seeds": statistics.median(self.seeds),
            "mean": statistics.mean(self.seeds),
            "seconds": statistics.median(self.seconds),
            "mean_seconds": statistics.mean(self.seconds),
        }


def measure(bug: Bug, most: int, sequences: int = SEQUENCES) -> Figures:
    """Search the first failing seed of each sequence."""
    found = Figures([], [])
    with bug.planted():
        for first in range(0, sequences * APART, APART):
            begun, count = time.process_time(), 1
            while bug.run(first + count - 1) is None and count < most:
                count += 1
            found.seeds.append(count)
            found.seconds.append(time.process_time() - begun)
            gc.collect()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the bugs that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.first_failures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--most", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    before: dict[str, dict[str, float]] = json.loads(options.against.read_text()) if options.against else {}
    rows: dict[str, dict[str, float]] = {}
    print(f"{'planted bug':34} {'seeds':>7} {'mean':>7} {'CPU s':>7} {'mean s':>7}" + ("   ratios" if before else ""))
    for name, bug in bugs().items():
        if not any(text in name for text in options.names):
            continue
        row = rows[name] = measure(bug, options.most, options.sequences).row()
        line = f"{name:34} {row['seeds']:7g} {row['mean']:7.1f} {row['seconds']:7.2f} {row['mean_seconds']:7.2f}"
        if name in before:
            old = before[name]
            line += f"   {row['seeds'] / old['seeds']:.2f} {row['mean'] / old['mean']:.2f}"
            line += f"   {row['seconds'] / old['seconds']:.2f} {row['mean_seconds'] / old['mean_seconds']:.2f}"
        print(line, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
