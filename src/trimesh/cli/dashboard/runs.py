"""Runs that the page can show: those that live, and dead ones of which flight records are left.

RU-1 A dead run is shown as it was at its last sign of life, with its root cause. Nothing can be done to it.
RU-2 A run is polled from the moment when a browser opens it; at most `limits.PAGE_RUNS_MAX` are open.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.recording import RunFolder, read_file
from trimesh._wire import flight
from trimesh.cli.dashboard.feed import PageFeed, RunSource, ShownRun
from trimesh.errors import ConnectError, ProtocolError
from trimesh.observe import Cause, OutputRow, RunSnapshot, SampleRow, autopsy, query, runs
from trimesh.observe.past import Past, read_past
from trimesh.observe.run_snapshot import is_alive_run, read_records, recorded_runs

_HEAD_BYTES: Final = flight.PAGE_BYTES


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list.

    Attributes:
        key: Names the run in requests: the pid of a living one, the folder of a dead one.
        pid, host, command: Its controller; command and host are empty without a flight record.
        began_at: Unix time; 0.0 if unknown.
        is_alive: Whether it lives.
        kind, text: Root cause of its death, as `Cause` has them; empty while it lives.
    """

    key: str
    pid: int
    host: str = ""
    command: str = ""
    began_at: float = 0.0
    is_alive: bool = False
    kind: str = ""
    text: str = ""


class DeadRun:
    """A run that has ended, from its flight records.

    Args:
        folder: Their folder.

    Raises:
        ConnectError: They cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._autopsy = autopsy(folder.path)
        self._is_told = False

    def snapshot(self) -> RunSnapshot:
        """Return the last state once.

        Raises:
            ConnectError: It was returned before.
        """
        if self._is_told:
            raise ConnectError(f"the run of process {self._folder.pid} has ended")
        self._is_told = True
        seen, job = self._autopsy.snapshot, self._autopsy.job
        memory = self._memory()
        procs = tuple(
            msgspec.structs.replace(
                proc, record=str(self._folder.path / proc.id), memory_bytes=proc.memory_bytes or memory.get(proc.id, 0)
            )
            for proc in seen.procs
        )
        job = None if job is None else msgspec.structs.replace(job, record=str(self._folder.path))
        failures = tuple(event for event in self._autopsy.events if event.is_failure)
        return msgspec.structs.replace(
            seen, procs=procs, job=job, events=self._autopsy.events[-limits.OBSERVED_ROWS :], failures=failures
        )

    def _memory(self) -> dict[str, int]:
        """Return the last known memory of each process, by id."""
        try:
            return dict(query("SELECT id, memory_bytes FROM procs", run=str(self._folder.path)).rows)
        except (ConnectError, ValueError):  # it keeps no history
            return {}

    def output(self, after: int) -> Sequence[OutputRow]:
        del after  # the lines were in the controller
        return ()

    def samples(self, after: int) -> tuple[int, Sequence[SampleRow]]:
        return after, ()

    def past(self, after: float, *, curves: bool) -> Past:
        return read_past(partial(query, run=str(self._folder.path)), after, curves=curves)

    def kill(self, proc_id: str) -> None:
        raise ConnectError(f"the run of process {self._folder.pid} has ended, got a request to kill {proc_id[:40]}")

    def cancel(self, call_id: str) -> None:
        raise ConnectError(f"the run of process {self._folder.pid} has ended, got a request to cancel {call_id[:40]}")

    def has_ended(self) -> bool:
        return True

    def cause(self) -> Cause | None:
        return self._autopsy.cause

    def cores(self) -> dict[str, float]:
        """Return the cores that each process used at its end, by id: between its last two samples of itself."""
        found = dict[str, float]()
        with suppress(ConnectError):
            for proc_id, one in read_records(self._folder.path).flights.items():
                views = [record for record in one.records if isinstance(record, flight.SeenView)]
                if len(views) > 1:
                    before, last = views[-2:]
                    used = last.view.proc.cpu_seconds - before.view.proc.cpu_seconds
                    found[proc_id] = max(0.0, used) / max(1e-3, last.at - before.at)
        return found

    def close(self) -> None:
        """Do nothing: no file is open."""


class RunList:
    """The runs of this user on this machine. Its methods block, and may run in several threads."""

    def __init__(self) -> None:
        self._causes: dict[str, Cause] = {}  # of dead runs, which do not change
        self._lock = threading.Lock()

    def entries(self) -> list[RunEntry]:
        """Return the living runs, then the dead ones, the newest of each first.

        Raises:
            ConnectError: Their folder cannot be trusted.
        """
        folders = recorded_runs()
        living = [folder for folder in folders if is_alive_run(folder)]
        found = [_entry(folder, str(folder.pid), is_alive=True) for folder in living]
        known = {folder.pid for folder in living}
        for run in runs():
            run.close()
            if run.pid not in known:
                found.append(RunEntry(key=str(run.pid), pid=run.pid, is_alive=True))
        for folder in folders:
            if folder not in living:
                cause = self._cause(folder)
                entry = _entry(folder, folder.path.name, is_alive=False)
                found.append(
                    entry if cause is None else msgspec.structs.replace(entry, kind=cause.kind, text=cause.text)
                )
        return found

    def _cause(self, folder: RunFolder) -> Cause | None:
        with self._lock:
            if folder.path.name not in self._causes:
                with suppress(ConnectError):  # removed meanwhile, or unreadable
                    self._causes[folder.path.name] = autopsy(folder.path).cause
            return self._causes.get(folder.path.name)

    @staticmethod
    def source(key: str) -> ShownRun:
        """Return the run of a key.

        Raises:
            ConnectError: There is none.
        """
        if key.isascii() and key.isdigit() and len(key) <= len(str(2**31)):
            return RunSource(int(key))
        folder = next((one for one in recorded_runs() if one.path.name == key), None)
        if folder is None or is_alive_run(folder):
            raise ConnectError(f"this user has no run {key[:40]!r}: reload the list of runs")
        return DeadRun(folder)


def first_run(pid: int | None) -> RunSource | None:
    """Return the run of a pid, or the only living one; None if there are several, or only dead ones.

    Raises:
        ConnectError: There is no run of that pid, or none at all.
    """
    living = runs()
    for run in living:
        run.close()
    if pid is None and len(living) != 1 and (living or recorded_runs()):
        return None
    return RunSource(pid)


def _entry(folder: RunFolder, key: str, *, is_alive: bool) -> RunEntry:
    entry = RunEntry(key=key, pid=folder.pid, began_at=folder.begun_at, is_alive=is_alive)
    try:
        job = flight.read_head(read_file(folder.path / folder.root, _HEAD_BYTES))[0].job
    except (OSError, ProtocolError):  # the controller keeps no record here
        return entry
    return entry if job is None else msgspec.structs.replace(entry, host=job.host, command=job.command)


class OpenRun(msgspec.Struct, frozen=True):
    """A run that is open in some browser."""

    feed: PageFeed
    source: ShownRun


class OpenRuns:
    """Runs that browsers have opened.

    Args:
        first: The run of the command; None if a browser has to choose.
        every: Polling interval in seconds.
    """

    def __init__(self, first: ShownRun | None, every: float = limits.PAGE_SECONDS) -> None:
        self._every = every
        self._open = dict[str, OpenRun]()
        self._lock = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self.list = RunList()
        if first is not None:
            self._open[""] = OpenRun(PageFeed(first, every), first)

    @property
    def has_first(self) -> bool:
        """Whether the command has named a run."""
        return "" in self._open

    async def run(self) -> None:
        """Feed them until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for one in self._open.values():
                    nursery.start_soon(one.feed.run)
                await trio.sleep_forever()
        finally:
            for key, one in self._open.items():
                if key:
                    one.source.close()

    async def get(self, key: str) -> OpenRun:
        """Return an open run; open it first if need be.

        Raises:
            ConnectError: There is none of that key, or too many are open.
        """
        async with self._lock:
            if key in self._open:
                return self._open[key]
            if not key:
                raise ConnectError("no run was chosen: open the list of runs")
            if len(self._open) >= limits.PAGE_RUNS_MAX:
                most = f"limits.PAGE_RUNS_MAX ({limits.PAGE_RUNS_MAX})"
                raise ConnectError(f"at most {most} runs can be open in one page: start trimesh dashboard again")
            assert self._nursery is not None
            source = await trio.to_thread.run_sync(self.list.source, key)
            every = 0.0 if isinstance(source, DeadRun) else self._every  # it has nothing to wait for
            found = self._open[key] = OpenRun(PageFeed(source, every), source)
            self._nursery.start_soon(found.feed.run)
            return found
