"""The command line.

python -m bench.profile call_one                     where its time goes, by part and by function
python -m bench.profile map --side here --source DIR one side; of another tree, whose native library is built
python -m bench.profile compare KEY DIR DIR call_one map
                                                     before and after, in turn, into profiles.json and .md
python -m bench.profile document                     profiles.md anew, from profiles.json

`--real-time` keeps other processes of the machine from taking part, where this user may say so. The list of workloads
is that of `bench.profile.workloads`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.profile.document import DATA, DOCUMENT, read_data, render, write_data
from bench.profile.profile import Profile, text
from bench.profile.sampler import ROOT, SamplerError, take
from bench.profile.workloads import WORKLOADS
from bench.report import machine

REAL_TIME_PRIORITY = 6
"""Of the samplers; programs have one less."""


def main(arguments: list[str]) -> int:
    """Do what the command line says; return the exit status."""
    options = parse(arguments)
    if options.real_time:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REAL_TIME_PRIORITY))  # children inherit it
    try:
        if options.command == "compare":
            compare(options)
        elif options.command == "document":
            DOCUMENT.write_text(render(DOCUMENT.read_text(), read_data()))
        else:
            show(options)
    except SamplerError as error:
        print(f"profiles are left out: {error}")
        return 0 if options.smoke else 1
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="where processor time goes, by part")
    parser.add_argument("command", choices=("compare", "document", *WORKLOADS), metavar="WORKLOAD|compare|document")
    parser.add_argument("what", nargs="*", help="for compare: a key, two trees, workloads (all if none is named)")
    parser.add_argument("--side", help="here, there or spawner; all if not given")
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree that is profiled; this one if not given")
    parser.add_argument("--seconds", type=float, default=4.0, help="under the clocks, and again under the sampler")
    parser.add_argument("--rounds", type=int, default=2, help="of a comparison, before and after in turn")
    parser.add_argument("--functions", type=int, default=12, help="how many are shown")
    parser.add_argument("--stacks", type=Path, help="a file for the samples, as flame graphs are drawn from")
    parser.add_argument("--real-time", action="store_true", help="run at real-time priority")
    parser.add_argument(
        "--smoke", action="store_true", help="a quarter of a second; to be without a sampler is no failure"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        options.seconds = 0.25
    if options.command == "compare" and (len(options.what) < 3 or not {*options.what[3:]} <= WORKLOADS.keys()):
        parser.error("compare needs a key, the tree before, the tree after, and names of workloads")
    if options.command != "compare" and options.what:
        parser.error(f"{options.command} takes nothing besides options, got {' '.join(options.what)}")
    return options


def show(options: argparse.Namespace) -> None:
    """Profile one workload and print it."""
    workload = WORKLOADS[options.command]
    if options.side and options.side not in workload.sides:
        raise SystemExit(f"sides of {options.command} are {', '.join(workload.sides)}, got {options.side!r}")
    profiles = take(options.command, options.source.resolve(), options.seconds)
    sides = [options.side] if options.side else list(workload.sides)
    summaries = {side: profiles[side].summary() for side in sides}
    functions = {side: profiles[side].functions(options.functions) for side in sides}
    print(text(f"{options.command}: {workload.title}", workload.item, summaries, functions))
    if options.stacks:
        lines = [
            f"{side};{';'.join(stack)} {count}" for side in sides for stack, count in profiles[side].stacks.items()
        ]
        options.stacks.write_text("\n".join(lines) + "\n")


def compare(options: argparse.Namespace) -> None:
    """Profile workloads of two trees in turn, and keep what came of it, beside what is known of the same commits."""
    key, *trees = options.what[:3]
    sources = {when: Path(tree).resolve() for when, tree in zip(("before", "after"), trees, strict=True)}
    commits = {when: commit_of(source) for when, source in sources.items()}
    data = read_data()
    known = data.get(key, {})
    if {when: known.get(when) for when in commits} != commits:
        known = {"workloads": {}}
    data[key] = known | {"machine": machine()} | commits
    for name in options.what[3:] or WORKLOADS:
        data[key]["workloads"][name] = compared(name, sources, options)
        write_data(data)
        print(f"{key}: {name}", flush=True)
    DOCUMENT.write_text(render(DOCUMENT.read_text(), data))
    print(f"written: {DATA}, {DOCUMENT}")


def compared(name: str, sources: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Profile one workload of two trees in turn; return the summary of each side, before and after."""
    found: dict[str, dict[str, Profile]] = {when: {} for when in sources}
    for turn in range(options.rounds):
        for when in sorted(sources, reverse=turn % 2 == 0):
            for side, profile in take(name, sources[when], options.seconds).items():
                if side in found[when]:
                    found[when][side].add(profile)
                else:
                    found[when][side] = profile
    return {when: {side: profile.summary() for side, profile in sides.items()} for when, sides in found.items()}


def commit_of(source: Path) -> str:
    """Return the short name of the commit that a tree is at."""
    done = subprocess.run(
        ["git", "-C", source, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "no commit"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
