"""Figures of trimesh beside those of torchmonarch, Ray and xoscar, taken in the same run on the same machine.

    python bench/run.py               all workloads, all sides, interleaved rounds; a table, and JSON in .bench/
    python bench/run.py --smoke       a few calls of each, to prove that they run
    python bench/run.py --only kill   one workload
    python bench/run.py --peer ray    beside one peer; --no-peer: beside none

Every round starts each side of each workload in a process of its own, in turn, so that all see the same neighbours.
Figures are medians over the rounds; "worst" is the worst of all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peer import PEERS, PeerError, own_python, peer_python  # noqa: E402 - the tree is not installed, its root is put on the path above
from bench.report import Result, Times, durations, machine, rows, table  # noqa: E402 - as above
from bench.scale import Samples  # noqa: E402 - as above

WORKLOADS = [
    "floors",
    "round_trip",
    "pipeline",
    "in_flight",
    "observed",
    "metrics",
    "page",
    "seeds",
    "asyncio",
    "services",
    "loop",
    "mesh_call",
    "payload",
    "fan_out",
    "spawn",
    "memory",
    "kill",
    "cancel",
    "stream",
    "slow_consumer",
    "beside",
    "loss",
    "restart",
    "rdma",
    "publish",
    "weights",
    "tensors",
    "gpt_step",
    "models",
    "global_tensors",
    "hosts",
]
SIDE_SECONDS_MAX = 300

MINUTES = 40
"""For all rounds; those that do not fit are left out, with a word."""

STATE = ROOT / ".bench"


def run_side(python: Path, workload: str, side: str, scale: str) -> Samples:
    """Run one side of one workload and return its samples.

    Raises:
        RuntimeError: It failed or took too long; the text holds its last words.
    """
    with tempfile.TemporaryDirectory(prefix="trimesh-bench-") as folder:
        output = Path(folder, "samples.json")
        command = [python, "-m", "bench.side", workload, side, scale, output]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed libraries have their bytecode, so has the tree
        with tempfile.TemporaryFile("w+") as said:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    timeout=SIDE_SECONDS_MAX,
                    check=False,
                )
                ended = f"ended with status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"took more than {SIDE_SECONDS_MAX} s"
            if output.is_file():
                return json.loads(output.read_text())
            said.seek(0)
            raise RuntimeError(f"{side} {workload} {ended}:\n{said.read()[-4000:]}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="trimesh beside its peers")
    parser.add_argument("--smoke", action="store_true", help="a few calls, one round, no installation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="a round that would end later is not begun")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="this workload; may be repeated")
    parser.add_argument("--peer", choices=PEERS, action="append", help="beside this one; may be repeated")
    parser.add_argument("--no-peer", action="store_true", help="trimesh alone")
    parser.add_argument("--json", type=Path, default=STATE / "latest.json", help="where the figures go")
    return parser.parse_args(arguments)


def find_sides(options: argparse.Namespace) -> dict[str, Path]:
    """Return each side's interpreter; a peer is left out, with a word, where it cannot be used."""
    sides = {"trimesh": Path(sys.executable)}
    for name in [] if options.no_peer else options.peer or PEERS:
        try:
            sides[name] = peer_python(name, STATE / name, install=not options.smoke)
        except PeerError as error:
            print(f"{name} is left out: {error}")
    return sides


def run_rounds(
    sides: dict[str, Path], results: dict[str, list[Result]], options: argparse.Namespace, times: Times
) -> set[str]:
    """Run every side of every workload in each round, adding to `results` and `times`; return the sides that failed.

    What a side takes counts to its end, whether it ends well or not.
    """
    failed = set()
    scale, rounds = ("smoke", 1) if options.smoke else ("full", options.rounds)
    begin = time.perf_counter()
    for turn in range(rounds):
        spent = time.perf_counter() - begin
        if turn and spent * (turn + 1) / turn > options.minutes * 60:
            print(f"round {turn + 1} of {rounds} is left out: it would end after more than {options.minutes:g} minutes")
            break
        for workload, found in results.items():
            module = workload_module(workload)
            lacks = getattr(module, "LACKS", {})
            requirements = getattr(module, "REQUIREMENTS", ())
            for side in sorted(sides, reverse=turn % 2 == 0):
                progress = f"round {turn + 1} of {rounds}: {side} {workload}"
                if side in lacks:
                    print(f"{progress}, left out: {lacks[side]}")
                    continue
                python = sides[side]
                try:
                    if requirements:
                        python = own_python(requirements, STATE / workload, install=not options.smoke)
                except PeerError as error:
                    print(f"{progress}, left out: {error}")
                    continue
                start = time.perf_counter()
                try:
                    samples = run_side(python, workload, side, scale)
                except RuntimeError as error:
                    failed.add(side)
                    print(error)
                    continue
                finally:
                    took = time.perf_counter() - start
                    times.setdefault(workload, {}).setdefault(side, []).append(took)
                for result in found:
                    result.add(side, samples)
                print(f"{progress}, {took:.1f} s", flush=True)
    return failed


def workload_module(name: str) -> ModuleType:
    """Return the module of a workload."""
    return importlib.import_module(f"bench.workloads.{name}")


def main(arguments: list[str]) -> int:
    """Run the benchmarks; return the exit status."""
    options = parse(arguments)
    results = {}
    for workload in options.only or WORKLOADS:
        results[workload] = [Result(metric) for metric in workload_module(workload).METRICS]
    sides = find_sides(options)
    peers = [side for side in sides if side != "trimesh"]
    times: Times = {}
    host = machine()
    failed = run_rounds(sides, results, options, times)

    every = [result for found in results.values() for result in found]
    print("\n{cpu}, {cores} cores, Linux {kernel}, Python {python}, load before {load:.1f}\n".format(**host))
    print(table(every, peers))
    print(f"\n{durations(times, list(sides))}")
    raw = [{"metric": result.metric.name, "rounds": result.rounds} for result in every]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"machine": host, "figures": rows(every, peers), "samples": raw, "seconds": times}, indent=1)
    )
    print(f"\nall samples: {options.json}")
    return 1 if "trimesh" in failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
