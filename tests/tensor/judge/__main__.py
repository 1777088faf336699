"""`make tensor-fuzz`: random programs over tensors of meshes, compared with plain torch.

    python -m tests.tensor.judge --programs 2000 --first-seed 0    # until one of the two is reached
    python -m tests.tensor.judge --seconds 120
    python -m tests.tensor.judge --falsify all                     # find each wrong rule that is planted
    python -m tests.tensor.judge --seed 17                         # one program, as a script, and what came of it
    python -m tests.tensor.judge --recorded                        # each program as a recorded function, replayed
    python -m tests.tensor.judge --once                            # ... only once, by the rules

Each program runs five times on the same ranks, on other numbers each time, so that it runs by what they have learnt.
What fails is grouped by kind and operation; of each group the first is made shorter and printed, with the line that
repeats it. Programs that were refused in words, and those that are known to fail (`expected`), are counted apart.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

import trio
from tests.tensor.judge.case import Case, look_into
from tests.tensor.judge.expected import EXPECTED, cause_of
from tests.tensor.judge.falsification import FALSIFIED, plant
from tests.tensor.judge.generator import extent_of, generate
from tests.tensor.judge.interpreter import LaterRun, MeshRun, RecordedRun
from tests.tensor.judge.program import Program, short, source
from tests.tensor.judge.session import Session, Verdict, session


def mesh_of(seed: int) -> str:
    """Return the mesh of a seed's program, as `--mesh` takes it."""
    return ",".join(f"{label}={size}" for label, size in extent_of(seed))


def seeds(options: argparse.Namespace) -> Iterator[Program]:
    """Yield programs until there are enough, or time is up."""
    end = time.monotonic() + options.seconds
    for seed in range(options.first_seed, options.first_seed + options.programs):
        if time.monotonic() > end:
            return
        if not options.mesh or options.mesh == mesh_of(seed):
            yield generate(seed, lines=options.lines)


class Tally:
    """What came of the programs so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.expected: Counter[str] = Counter()
        self.groups: dict[tuple[str, str], list[tuple[Verdict, list[Program]]]] = {}

    def add(self, verdict: Verdict, history: list[Program]) -> None:
        """Count a verdict."""
        kind = "ill posed" if verdict.is_ill_posed else verdict.kind
        if kind == "wrong":
            cause = cause_of(verdict)
            if cause is not None:
                self.counts["known"] += 1
                self.expected[cause] += 1
                return
            first = next(one for one in verdict.findings if one.kind != "refusal")
            group = self.groups.setdefault((first.kind, first.operation), [])
            group.append((verdict, history[: verdict.before]))
            if len(group) == 1:
                print(
                    f"seed {verdict.program.seed}: {first.kind} {first.name} {first.text} | {first.operation}",
                    flush=True,
                )
        elif kind == "refused":
            self.refusals[f"{verdict.findings[0].operation}: {verdict.findings[0].text}"] += 1
        self.counts[kind] += 1

    def print(self) -> None:
        """Print all but the failures."""
        for text, count in self.refusals.most_common(12):
            print(f"  refused {count}: {text[:160]}")
        for text, count in self.expected.most_common():
            print(f"  known {count}: {text}")
        for (kind, operation), found in sorted(self.groups.items(), key=lambda one: -len(one[1])):
            print(f"  wrong {len(found)}: {kind} by {operation}, seeds {[one.program.seed for one, _ in found[:6]]}")


async def search(options: argparse.Namespace) -> int:
    """Run programs; return how many failures are new."""
    tally = Tally()
    started = time.monotonic()
    async with session(options.runs) as found:
        programs = seeds(options)
        async for verdict in found.judge(programs):
            tally.add(verdict, (await found.bench(verdict.program.extent)).history)
        took = time.monotonic() - started
        total = sum(tally.counts.values())
        rate = f"{total / took:.1f} a second ({total / max(found.spent, 1e-9):.1f} on the mesh)"
        print(f"{total} programs from seed {options.first_seed} on in {took:.0f} s, {rate}: {dict(tally.counts)}")
        tally.print()
        cases = sorted(tally.groups.values(), key=lambda one: -len(one))[: options.shrink]
        for group in cases:
            verdict, history = min(group, key=lambda one: len(one[0].program.steps))
            print("\n" + (await _case(found, verdict, history)).text(), flush=True)
    passing = sorted({one.cause for one in EXPECTED} - set(tally.expected)) if total >= 2000 else []
    for cause in passing:
        print(f"no program showed any more: {cause}")
    return tally.counts["wrong"]


async def _case(found: Session, verdict: Verdict, history: list[Program]) -> Case:
    return await look_into(found, verdict, history)


async def one(options: argparse.Namespace) -> int:
    """Run the program of one seed and print everything about it."""
    program = generate(options.seed, lines=options.lines)
    print(short(program) + "\n")
    async with session(options.runs) as found:
        verdict = await (await found.bench(program.extent)).judge_one(program)
        for finding in verdict.findings:
            print(f"{finding.kind} {finding.name} {finding.text}\n  by {finding.operation}")
        if verdict.kind == "wrong":
            case = await look_into(found, verdict, [])
            print("\n" + case.text() + "\n\n" + case.script())
        else:
            print(verdict.kind + "\n\n" + source(program))
    return int(verdict.kind == "wrong")


async def falsify(options: argparse.Namespace) -> int:
    """Plant wrong rules, one after the other; return how many were not found."""
    missed = 0
    async with session() as right:
        for name, wrong in FALSIFIED.items():
            if options.falsify not in {"all", name}:
                continue
            started = time.monotonic()
            seed, programs = await _first_seed(right, name, options)
            took = f"{programs} programs, {time.monotonic() - started:.0f} s"
            found = f"seed {seed} (--lines '{wrong.lines}')" if seed is not None else "MISSED"
            print(f"{name}: {found}, {took}", flush=True)
            missed += seed is None
    return missed


async def _first_seed(right: Session, name: str, options: argparse.Namespace) -> tuple[int | None, int]:
    """Return the first seed that a wrong rule fails and the right one does not, and how many programs it took."""
    programs = 0
    drawn = argparse.Namespace(**{**vars(options), "lines": FALSIFIED[name].lines})
    async with aclosing(right.planted(partial(plant, name)).judge(seeds(drawn))) as verdicts:
        async for verdict in verdicts:
            programs += 1
            if verdict.kind != "wrong":
                continue
            beside = await (await right.spare(verdict.program.extent)).judge_one(verdict.program)
            if beside.kind == "right":
                return verdict.program.seed, programs
    return None, programs


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tensor.judge", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shrink", type=int, default=20, help="groups of failures of which one is made shorter")
    parser.add_argument("--seed", type=int, help="one program")
    parser.add_argument("--lines", default="", help="a pattern: lines of the table that it fits are drawn most")
    parser.add_argument("--mesh", default="", help="only programs of this mesh, a=2,b=2 for example: starts fewer")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--once", dest="runs", action="store_const", const=MeshRun, help="not again on other numbers")
    ways.add_argument("--recorded", dest="runs", action="store_const", const=RecordedRun, help="as a recorded function")
    parser.set_defaults(runs=LaterRun)
    parser.add_argument("--falsify", default="", help="a wrong rule that is planted and must be found, or all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # each failure that nobody has asked for is one
    what = falsify if options.falsify else one if options.seed is not None else search
    failures = trio.run(what, options)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
