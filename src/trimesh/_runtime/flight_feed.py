"""Feed of this process's flight record: opened at the start, written once a second, closed at the end.

KE-1 A record or history that cannot be opened does not fail the run; it is logged once.
KE-2 Snapshots take at most `limits.RECORD_SHARE` of the time of the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.gpu_feed import keep_reading
from trimesh._runtime.recording import FlightRecorder, folder_here, make_run_folder, remove, thin_out
from trimesh._runtime.snapshot import brief_look, job_of, proc_name
from trimesh._runtime.system.exits import start_of
from trimesh._runtime.system.records import WorkerConfig
from trimesh._transport.native.carriers import boot_id
from trimesh._wire import flight, observed
from trimesh._wire.exceptions.tracebacks import raised_at
from trimesh.config import Settings
from trimesh.errors import leaves, place_name, text_of

if TYPE_CHECKING:
    from trimesh._runtime.history import KeptHistory
    from trimesh._runtime.life.proc import Proc


_log = logging.getLogger("trimesh")
_THIN_OUT_LOOKS = 30
_CLOCK_READINGS = 5


class FlightRecord:
    """The open flight record of a process."""

    def __init__(self, proc: Proc, recorder: FlightRecorder) -> None:
        self._proc = proc
        self._recorder = recorder
        self._history: KeptHistory | None = None
        proc.recorder = proc.journal.recorder = recorder

    async def keep_looking(self) -> None:
        """Write a snapshot of the process once a second, or less often if that is slow."""
        recorder, every, looks = self._recorder, limits.RECORD_SECONDS, 0
        while True:
            await trio.sleep(every)
            began_at = time.thread_time()
            try:
                recorder.fold()
                view = brief_look(self._proc)
            except Exception as error:  # noqa: BLE001 - a failed record must not end the run
                _log.warning("no more snapshots are written to the flight record %s", recorder.path, exc_info=error)
                return
            every = max(limits.RECORD_SECONDS, (time.thread_time() - began_at) / limits.RECORD_SHARE)
            recorder.note(flight.SeenView(at=time.time(), trio_at=self._proc.now(), every=every, view=view))
            looks += 1
            if looks % _THIN_OUT_LOOKS == 0 and view.job is not None:
                thin_out(recorder.path.parent)

    async def read_gpus(self, settings: Settings) -> None:
        """Keep the use of GPUs in the rows of the process."""
        await keep_reading(self._proc, settings)

    async def keep_history(self, seconds: float) -> None:
        """Keep the history of the run beside the record of its controller."""
        try:
            from trimesh._runtime.history import KeptHistory  # noqa: PLC0415 - workers keep none

            self._history = KeptHistory(self._proc, self._recorder.path.parent, seconds)
            await self._history.keep()
        except Exception as error:  # noqa: BLE001 - out of descriptors or threads, say
            _log.warning("no history of this run is kept: %s: %s", type(error).__name__, error)

    def end_run(self, error: BaseException | None) -> None:
        """End record and history of a controller; remove them after a run without an error.

        Args:
            error: Error by which the outermost block was left.
        """
        if self._history is not None:
            self._history.end("" if error is None else _said(error))
        if error is None:
            self._recorder.end()
            remove(self._recorder.path.parent)
            return
        self._recorder.note(flight.LeftBlock(at=time.time(), error=_said(error), line=_line_of(error)))
        self._recorder.end()

    def end_worker(self, config: WorkerConfig) -> None:
        """End the record of a worker that was stopped; with a remote controller the worker removes it itself."""
        self._recorder.end()
        if config.is_far:
            _remove_own(self._recorder.path)


def record_run(proc: Proc) -> FlightRecord | None:
    """Begin the flight record of a controller, in a folder of its own."""
    row = observed.ProcRow(id=proc_name(proc.proc_id), pid=proc.pid, host=proc.host_name)
    try:
        folder = make_run_folder(proc.pid, row.id)
        return _opened(proc, folder, row, job_of(proc, str(folder)))
    except OSError as error:
        _log.warning("no flight record of this run is kept: %s", error)
        return None


def record_worker(proc: Proc, config: WorkerConfig) -> FlightRecord | None:
    """Begin the flight record of a worker, in the folder of its run."""
    if not config.record:
        return None
    point, rest = list[tuple[str, int]](), config.rank
    for label, size in zip(reversed(config.labels), reversed(config.sizes), strict=True):
        point.append((label, rest % max(size, 1)))
        rest //= max(size, 1)
    where = dict(reversed(point))
    row = observed.ProcRow(
        id=proc_name(config.proc_id),
        parent=proc_name(config.parent_id),
        name=place_name(config.mesh, where),
        mesh=config.mesh,
        point=where,
        incarnation=config.incarnation,
        pid=proc.pid,
        host=proc.host_name,
    )
    try:
        folder = folder_here(Path(config.record)) if config.is_far else Path(config.record)
        return _opened(proc, folder, row, None)
    except OSError as error:
        _log.warning("no flight record of %s is kept: %s", row.name, error)
        return None


def _opened(proc: Proc, folder: Path, row: observed.ProcRow, job: observed.JobRow | None) -> FlightRecord:
    now, clock_at, trio_at, started_at = _clocks()
    head = flight.FlightHead(
        proc=row,
        job=job,
        started_at=started_at,
        trio_at=trio_at,
        clock_at=clock_at,
        ticks=start_of(proc.pid) or 0,
        boot=boot_id(),
    )
    try:
        return FlightRecord(proc, FlightRecorder(folder / row.id, head, now))
    except ValueError as error:  # the names do not fit into the head
        raise OSError(str(error)) from None


def _clocks() -> tuple[Callable[[], float], float, float, float]:
    """Return the clock of a record, and simultaneous readings of it, Trio's and the system's clock.

    Trio's own clock is `perf_counter` plus a constant, in Python; the record reads the faster function in C.
    """
    clock = trio.lowlevel.current_clock()
    now = time.perf_counter if type(clock).__name__ == "SystemClock" else clock.current_time
    found = list[tuple[float, float, float, float]]()
    for _ in range(_CLOCK_READINGS):  # the shortest one was not interrupted
        before = now()
        trio_at, unix_at = clock.current_time(), time.time()
        found.append((now() - before, before, trio_at, unix_at))
    _, clock_at, trio_at, unix_at = min(found)
    return now, clock_at, trio_at, unix_at


def _remove_own(path: Path) -> None:
    """Remove one record, and its folder with the last one."""
    try:
        path.unlink()
        path.parent.rmdir()
    except OSError:
        return


def _line_of(error: BaseException) -> str:
    return raised_at(next(leaves(error), error))[: limits.OBSERVED_TEXT_CHARS]


def _said(error: BaseException) -> str:
    first = next(leaves(error), error)
    try:
        text = f"{type(first).__name__}: {text_of(first)}"
    except Exception:  # noqa: BLE001 - the `__str__` is the program's
        text = type(first).__name__
    return text[: limits.OBSERVED_TEXT_CHARS]
