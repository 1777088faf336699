"""`trimesh trace`: when calls ran, as a file that ui.perfetto.dev shows."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trimesh import limits
from trimesh.errors import ConnectError
from trimesh.observe import Timeline, find_records, find_run, read_records, runs, trace_bytes


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
            except ConnectError:  # it has ended well: its records are gone, and what was read is there
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
