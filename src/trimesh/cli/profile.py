"""`trimesh profile`: py-spy over the processes of a run, as one flame graph with a root frame for each member."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from trimesh import limits
from trimesh.cli.members import ArgumentRefused, run_of, seconds_of
from trimesh.cli.text import clean, one_line
from trimesh.errors import ConnectError
from trimesh.observe import ProcRow, Timeline, find_records, find_run, read_records, runs, trace_bytes

_PROCS_MAX: Final = 64
"""Each process gets its own py-spy: more would take cores from the run."""

_SLACK_SECONDS: Final = 30.0
"""Additional time for py-spy to find the interpreter in a process, and to write."""


def profile(
    file: Path = Path("trimesh-profile.folded"),
    /,
    *,
    seconds: Annotated[float, Parameter(name="--seconds")] = 5.0,
    rate: Annotated[int, Parameter(name="--rate")] = 100,
    native: Annotated[bool, Parameter(name="--native", negative="")] = False,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
) -> int:
    """Sample the stacks of a run's processes on this machine; write folded stacks for speedscope.app.

    Each line of the file is a stack, outermost first, and the number of its samples; its first frame is the process, as
    `ps` shows it. The run is not stopped. It needs py-spy: pip install 'trimesh-actors[profile]'.

    Exit codes: 0; 1 some process could not be sampled, or the file cannot be written; 2 wrong usage; 3 there is no run.

    Args:
        file: File to write.
        seconds: Duration in seconds, rounded up to whole ones.
        rate: Samples per second of each process.
        native: Include C frames; processes are then stopped for each sample.
        pid: Process id of the controller.
    """
    seconds_of("--seconds", seconds)
    if rate < 1:
        raise ArgumentRefused(f"--rate must be at least 1 sample a second, got {rate}")
    spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if spy is None:
        sys.stderr.write("trimesh: profile needs py-spy: pip install 'trimesh-actors[profile]'\n")
        return 1
    with find_run(pid) as one:
        seen = one.snapshot()
    here = seen.job.host if seen.job is not None else ""
    alive = [proc for proc in seen.procs if proc.host == here and proc.pid and proc.state != "dead"]
    how = ["--rate", str(rate), "--duration", str(max(1, -int(-seconds // 1)))]
    how.append("--native" if native else "--nonblocking")
    lines, failed = _sampled(spy, how, alive[:_PROCS_MAX], max(1.0, seconds) + _SLACK_SECONDS)
    try:
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"trimesh: the profile cannot be written: {error}\n")
        return 1
    for name, why in failed.items():
        sys.stderr.write(f"trimesh: {clean(name)} could not be sampled: {one_line(why)}\n")
    if len(alive) > _PROCS_MAX:
        sys.stderr.write(f"trimesh: {len(alive) - _PROCS_MAX} more processes were not sampled (limit {_PROCS_MAX})\n")
    return 1 if failed else 0


def _sampled(
    spy: str, how: Sequence[str], procs: Sequence[ProcRow], seconds: float
) -> tuple[list[str], dict[str, str]]:
    """Return folded stacks of processes, and why some could not be sampled; no py-spy is left behind."""
    lines, failed = list[str](), dict[str, str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimesh-profile-")))
        spies = list[subprocess.Popen[str]]()
        for proc in procs:
            command = [spy, "record", *how, "--format", "raw", "--output", f"{folder}/{proc.pid}", "--pid"]
            one = subprocess.Popen(  # noqa: S603 - py-spy, with numbers and paths of ours
                [*command, str(proc.pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            spies.append(stack.enter_context(one))
            stack.callback(one.kill)  # runs before the wait of `Popen.__exit__`: after Ctrl-C, py-spy may still run
        for proc, one in zip(procs, spies, strict=True):
            try:
                _, words = one.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                failed[proc.name] = "py-spy did not end"
                continue
            found = folder / str(proc.pid)
            if one.returncode or not found.exists():
                failed[proc.name] = words or f"py-spy ended with {one.returncode}"
                continue
            lines += under(proc.name, found.read_text(encoding="utf-8", errors="replace"))
    return lines, failed


def under(name: str, folded: str) -> Iterator[str]:
    """Yield folded stacks of one process with its name as their outermost frame."""
    first = clean(name).replace(";", ",").replace("\n", " ")
    for line in folded.splitlines():
        frames, _, count = line.rpartition(" ")
        if frames and count.isdecimal():
            yield f"{first};{clean(frames)} {count}"


# ---- `trimesh trace`: a time line of calls, as a file for ui.perfetto.dev --------------------------------------------


def trace(
    file: Path = Path("trimesh-trace.json"),
    /,
    *,
    seconds: Annotated[float, Parameter(name="--seconds")] = 5.0,
    run: Annotated[str, Parameter(name="--run")] = "",
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
) -> int:
    """Write a time line of a run's calls, by process and actor, to a file for ui.perfetto.dev.

    It reads the flight records of the processes on this machine, which does not disturb the run.

    Exit codes: 0, 1 the file cannot be written, or calls are missing in it, 3 there is no run and no record of one.

    Args:
        file: File to write.
        seconds: Duration in seconds, from now on; of a dead run its last seconds.
        run: A dead run: its number, or the folder of its flight records.
        pid: Process id of a run's controller; by default the only living run, or the newest dead one.
    """
    seconds_of("--seconds", seconds)
    run, pid = run_of(run, pid)
    timeline = Timeline()
    records = read_records(Path(run)) if run else find_records(pid=_running(pid))
    since = until = time.time()
    if records.is_running:
        ends_at = time.monotonic() + seconds
        while True:
            timeline.take(records, since)
            until = time.time()
            left = ends_at - time.monotonic()
            if left <= 0 or not records.is_running:
                break
            time.sleep(min(left, limits.TRACE_SECONDS))
            try:
                records = read_records(records.folder)
            except ConnectError:  # it ended well and deleted its records; keep those already read
                break
    else:
        timeline.take(records)
        until = timeline.last_at
        since = until - seconds
    try:
        with file.open("wb") as target:
            target.writelines(trace_bytes(timeline, since, until))
    except OSError as error:
        sys.stderr.write(f"trimesh: the trace cannot be written: {error}\n")
        return 1
    if missing := timeline.missing(since):
        sys.stderr.write(f"trimesh: {missing} calls are missing: newer ones overwrote them before they were read\n")
    return 1 if missing else 0


def _running(pid: int | None) -> int | None:
    """Return the pid of the controller: the given one, or that of the only living run; None if no run is alive.

    Raises:
        ConnectError: Several runs are alive.
    """
    if pid is None:
        found = runs()
        for one in found:
            one.close()
        if found:
            with find_run() as chosen:
                return chosen.pid
    return pid
