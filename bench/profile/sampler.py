"""Runs a workload in a program of its own, first under the kernel's clocks, then under perf, then under py-spy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.profile.clocks import Clock
from bench.profile.perf import find_perf, shares
from bench.profile.profile import Profile, Stack
from bench.profile.workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[2]
SAMPLES_PER_SECOND = 1000
PATIENCE_SECONDS = 60
"""For a sampler that has been told how long to sample, and for a program that has been told to end."""


class SamplerError(Exception):
    """There is no sampler here, or it may not look at other processes; the text says why."""


def take(name: str, source: Path, seconds: float) -> dict[str, Profile]:
    """Profile a workload once; return the profile of each side.

    Args:
        name: Of the workload.
        source: The tree whose `src` is profiled, its native library built.
        seconds: For the clocks, and as long again for the sampler.

    Raises:
        SamplerError: See there.
        RuntimeError: The program has failed.
    """
    workload = WORKLOADS[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source / "src"), str(ROOT)])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not workload.is_spinning:
        environment["TRIMESH_SPIN"] = "off"
    if workload.step is None:
        return {workload.sides[0]: _take_programs(environment, seconds)}
    return _take_program(name, workload, environment, seconds)


def _take_program(name: str, workload: Workload, environment: dict[str, str], seconds: float) -> dict[str, Profile]:
    command = [sys.executable, "-m", "bench.profile.program", name, f"{seconds:g}"]
    with (
        tempfile.TemporaryDirectory(prefix="trimesh-profile-") as folder,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program,
    ):
        _let_samplers_go_first(program.pid)
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            line = program.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"the program of {name} has ended with status {program.wait()} before it was measured"
                )
            said: dict[str, Any] = json.loads(line)
            pids = [str(pid) for pid in said["pids"].values()]
            options = ["--tid", ",".join(pids), "--", "sleep", f"{seconds:g}"]
            kinds = shares(perf, options) if (perf := find_perf()) else {}
            files = {side: Path(folder, side) for side in said["pids"]}
            with contextlib.ExitStack() as ended:
                for side, pid in said["pids"].items():
                    options = ["--pid", str(pid), "--duration", f"{max(1, round(seconds))}"]
                    ended.enter_context(_sampling(files[side], options, has_native=not workload.is_spinning))
        finally:
            program.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(PATIENCE_SECONDS)
            program.kill()
        return {
            side: Profile(
                said["items"], Clock(**clock), kinds.get(said["pids"][side], Counter()), read_stacks(files[side])
            )
            for side, clock in said["clocks"].items()
        }


def _let_samplers_go_first(pid: int) -> None:
    """Lower the real-time priority of a program, if it has one, below that of its samplers, which are as this process.

    At the same priority they would wait until it sleeps, and so sample that.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        lower = max(1, os.sched_getparam(0).sched_priority - 1)
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(lower))


def _take_programs(environment: dict[str, str], seconds: float) -> Profile:
    """Profile programs that only import: some under the clocks, as many again under the sampler."""
    command = [sys.executable, "-m", "bench.profile.imports"]
    clock, count = Clock(0, 0, 0, 0, 0, 0, 0), 0
    kinds, stacks = Counter[str](), Counter[Stack]()
    _run_to_end(command, environment)  # bytecode is written, files are in memory
    while clock.main_us < seconds * 1e6 * 0.8:
        clock += _run_to_end(command, environment)
        count += 1
    if perf := find_perf():
        for _ in range(count):
            for found in shares(perf, ["--", *command], environment).values():
                kinds += found
    with tempfile.TemporaryDirectory(prefix="trimesh-profile-") as folder:
        for turn in range(count):
            file = Path(folder, str(turn))
            with _sampling(file, ["--", *command], environment=environment):
                pass
            stacks += read_stacks(file)
    return Profile(count, clock, kinds, stacks)


def _run_to_end(command: Sequence[str], environment: dict[str, str]) -> Clock:
    program = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    _, status, used = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise RuntimeError(f"{' '.join(command)} has ended with status {program.returncode}")
    user_us, system_us = used.ru_utime * 1e6, used.ru_stime * 1e6
    return Clock(
        main_us=user_us + system_us, others_us=0, ended_us=0, user_ticks=round(user_us), system_ticks=round(system_us),
        faults=used.ru_minflt, sleeps=used.ru_nvcsw,
    )  # fmt: skip


@contextlib.contextmanager
def _sampling(
    file: Path, options: list[str], *, has_native: bool = True, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """Sample a process until it, or the duration that the options give, has ended."""
    found = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise SamplerError("py-spy is not installed; it is one of the requirements of `make setup-dev`")
    command = [found, "record", "--format", "raw", "--nolineno", "--rate", str(SAMPLES_PER_SECOND)]
    command += ["--output", str(file), "--native" if has_native else "--nonblocking", *options]
    sampler = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    yield
    try:
        _, said = sampler.communicate(timeout=PATIENCE_SECONDS)
    finally:
        sampler.kill()
    if not file.is_file():
        lines = said.decode(errors="replace").strip().splitlines() or [f"exit status {sampler.returncode}"]
        raise SamplerError(f"py-spy has no samples: {lines[-1]}")


def read_stacks(file: Path) -> Counter[Stack]:
    """Return the samples of a file that py-spy has written as `raw`: frames with semicolons between, a count."""
    stacks = Counter[Stack]()
    for line in file.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(count)
    return stacks
