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
from trimesh.cli.text import clean, one_line
from trimesh.errors import ConnectError
from trimesh.observe import ProcRow, Timeline, find_records, find_run, read_records, runs, trace_bytes

_PROCS_MAX: Final = 64
"""Each has a py-spy of its own meanwhile: more would take the cores from the run."""

_SLACK_SECONDS: Final = 30.0
"""For py-spy to find the interpreter in a process, and to write."""


def profile(
    file: Path = Path("trimesh-profile.folded"),
    /,
    *,
    seconds: Annotated[float, Parameter(name="--seconds")] = 5.0,
    rate: Annotated[int, Parameter(name="--rate")] = 100,
    native: Annotated[bool, Parameter(name="--native", negative="")] = False,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
) -> int:
    """Sample the stacks of all processes of a run on this machine; write folded stacks, which speedscope.app shows.

    Each line of the file is a stack, outermost first, and how often it was seen; its first frame is the process, as
    `ps` shows it. The run is not stopped for it. `pip install 'trimesh-actors[profile]'` brings py-spy, which it needs.

    Args:
        file: Where to write.
        seconds: For how long, rounded up to whole ones.
        rate: Samples a second of each process.
        native: Show frames of C, too; processes are then stopped for each sample.
        pid: Of the controller.

    Exit codes: 0, 1 some process could not be sampled, 3 there is no run.
    """
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
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for name, why in failed.items():
        sys.stderr.write(f"trimesh: {clean(name)} could not be sampled: {one_line(why)}\n")
    if len(alive) > _PROCS_MAX:
        sys.stderr.write(f"trimesh: {len(alive) - _PROCS_MAX} processes more were left out\n")
    return 1 if failed else 0


def _sampled(
    spy: str, how: Sequence[str], procs: Sequence[ProcRow], seconds: float
) -> tuple[list[str], dict[str, str]]:
    """Return folded stacks of processes, and why those of some could not be had; no py-spy is left behind."""
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
            stack.callback(one.kill)  # before it is waited for, as a Ctrl-C may be why this is left
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


# ---- `trimesh trace`: when calls ran, as a file that ui.perfetto.dev shows -------------------------------------------


def trace(
    file: Path = Path("trimesh-trace.json"),
    /,
    *,
    seconds: Annotated[float, Parameter(name="--seconds")] = 5.0,
    run: Annotated[str, Parameter(name="--run")] = "",
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
) -> int:
    """Write when calls ran, by process and actor, into a file for ui.perfetto.dev; of a dead run its last seconds.

    It is made of the flight records of the processes on this machine, of which the run notices nothing.

    Args:
        file: Where to write.
        seconds: Of the run, from now on; of a dead one up to its end.
        run: Folder of the flight records of a dead run.
        pid: Of the controller of a run; else the only one that runs, or the newest dead one.

    Exit codes: 0, 1 the file cannot be written, or calls are missing in it, 3 there is no run and no record of one.
    """
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
        sys.stderr.write(f"trimesh: {missing} calls are missing: they were written over before they were read\n")
    return 1 if missing else 0


def _running(pid: int | None) -> int | None:
    """Return the pid of the controller that is meant; None for the newest dead run, if no run goes on.

    Raises:
        ConnectError: Several runs go on.
    """
    if pid is None:
        found = runs()
        for one in found:
            one.close()
        if found:
            with find_run() as chosen:
                return chosen.pid
    return pid
