"""`make soak`: many schedules of the mixed workload in several processes, until the first that breaks a rule.

    python -m tests.soak.run --schedules 10000 --processes 2 --first-seed 0
    python -m tests.soak.run --mutation all                             # find each planted bug anew
    python -m tests.soak.run --workload hosts --minutes 60              # real hosts in network namespaces, see there

Process k of n takes every nth seed from `first-seed + k` on. A line of progress comes every few seconds; the last line
says how many schedules there were, and how many in a second. A breach ends all: what it was, and the line that repeats
it and finds the faults and steps that it needs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Final

import attrs
from tests.soak.mutations import MUTATIONS, Finding, Mutation, find

PROGRESS_SECONDS: Final = 5.0

COLLECT_EVERY: Final = 20
"""Schedules between two collections of garbage. None happens within a run, which is quicker, and always the same."""

WORKLOADS: Final = {
    "mixed": ("tests.soak.workload", "tests/soak/test_soak.py::test_mixed_workload"),
    "pool": (
        "tests.service.pool_workload",
        "tests/service/test_pool_workload.py::test_each_request_has_one_outcome_whatever_happens",
    ),
    "loop": ("tests.service.loop_workload", "tests/service/test_loop_workload.py::test_loop_whatever_happens"),
}
"""Modules with `run_schedule(seed)`, and the test that runs one of its seeds."""

HOSTS: Final = "hosts"
"""The workload that is not simulated: `tests.jobs.network.chaos`."""

MUTATION_SEEDS: Final = 1_000
"""Seeds within which a planted bug must be found."""


@attrs.frozen
class Report:
    """What a process says.

    Attributes:
        schedules: How many it has run since it said something.
        entries: Of their traces.
        seed: Of the first that broke a rule, or None.
        breach: How.
    """

    schedules: int
    entries: int
    seed: int | None = None
    breach: str = ""


def run_seeds(seeds: Iterable[int], workload: str = "mixed") -> Iterator[Report]:
    """Run schedules; yield a report now and then, and one of the first breach."""
    run_schedule = importlib.import_module(WORKLOADS[workload][0]).run_schedule
    count = entries = 0
    said = time.monotonic()
    for number, seed in enumerate(seeds):
        outcome = run_schedule(seed)
        count, entries = count + 1, entries + len(outcome.simulation.trace.entries)
        if outcome.error is not None:
            yield Report(count, entries, seed, f"{type(outcome.error).__name__}: {outcome.error}")
            return
        if number % COLLECT_EVERY == 0:
            del outcome
            gc.collect()
        if time.monotonic() - said > PROGRESS_SECONDS:
            yield Report(count, entries)
            count = entries = 0
            said = time.monotonic()
    yield Report(count, entries)


def replay(seed: int, workload: str = "mixed") -> str:
    """Return the command that repeats a schedule, and finds what its failure needs."""
    return f"pytest '{WORKLOADS[workload][1]}' --mesh-seed={seed:#x}"


def _work(seeds: range, workload: str, out: Connection) -> None:
    logging.disable(logging.CRITICAL)  # a block that takes its time says so, which means nothing in virtual time
    gc.disable()
    for report in run_seeds(seeds, workload):
        out.send(report)
    out.close()


def soak(schedules: int, processes: int, first_seed: int, workload: str) -> int:
    """Run so many schedules; return the exit status."""
    context = multiprocessing.get_context("spawn")
    ends: dict[Connection, multiprocessing.process.BaseProcess] = {}
    for number in range(processes):
        mine = range(first_seed + number, first_seed + schedules, processes)
        end, other = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(mine, workload, other), daemon=True)
        process.start()
        other.close()
        ends[end] = process
    started, done, entries, status = time.monotonic(), 0, 0, 0
    while ends and not status:
        for end in wait(list(ends)):
            assert isinstance(end, Connection)
            try:
                report: Report = end.recv()
            except EOFError:
                process = ends.pop(end)
                process.join()
                if process.exitcode:
                    print(f"a process has ended with {process.exitcode}")
                    status = 2
                continue
            done, entries = done + report.schedules, entries + report.entries
            rate = done / (time.monotonic() - started)
            print(f"{done} of {schedules} schedules, {rate:.1f} in a second", flush=True)
            if report.seed is not None:
                print(f"seed {report.seed:#x} breaks a rule: {report.breach}\nreplay: {replay(report.seed, workload)}")
                status = 1
    for process in ends.values():
        process.terminate()
        process.join()
    seconds = time.monotonic() - started
    print(
        f"{done} schedules in {seconds:.0f} s, {done / seconds:.1f} in a second, by {processes} processes: "
        f"{entries} things happened, {'a rule was broken' if status else 'every rule held'}"
    )
    return status


def search(names: Iterable[str], seeds: int) -> int:
    """Find planted bugs; print the table of `README.md`, return the exit status."""
    logging.disable(logging.CRITICAL)
    missed = 0
    print("| planted bug | found by | first seed |\n|---|---|---|")
    for name in names:
        mutation = MUTATIONS[name]
        found = find(mutation, range(seeds))
        missed += found is None
        print(row(mutation, found, seeds), flush=True)
    return int(missed > 0)


def row(mutation: Mutation, found: Finding | None, seeds: int) -> str:
    """Return a line of the table."""
    if found is None:
        return f"| {mutation.text} | nothing | none of {seeds} |"
    return f"| {mutation.text} | {found.rule} | {found.seed} |"


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first-seed", type=lambda text: int(text, 0), default=0)
    parser.add_argument("--workload", choices=[*WORKLOADS, HOSTS], default="mixed")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the workload hosts")
    parser.add_argument("--mutation", choices=["all", *MUTATIONS], help="find a planted bug instead")
    options = parser.parse_args(arguments)
    if options.mutation is not None:
        return search(MUTATIONS if options.mutation == "all" else [options.mutation], MUTATION_SEEDS)
    if options.workload == HOSTS:
        chaos = importlib.import_module("tests.jobs.network.chaos")
        return int(chaos.main(["--minutes", str(options.minutes), "--seed", str(options.first_seed)]))
    return soak(options.schedules, options.processes, options.first_seed, options.workload)


if __name__ == "__main__":
    sys.exit(main())
