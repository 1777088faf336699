"""History of a run: rows, events and metrics of the last hour in one SQLite file beside the flight records.

HI-1 Calls pay nothing: a thread of the controller writes, in one transaction a second.
HI-2 Rows have a bound of age, number and bytes; the oldest of what has ended go first.
HI-3 The file is removed with the flight records. A killed run leaves it readable up to its last second.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._runtime.recording import HISTORY_FILE
from trimesh._runtime.sampling import SampleBatch, SinkThread, sampling_of
from trimesh._runtime.snapshot import look, take_samples
from trimesh._wire.history import TABLES, schema

if TYPE_CHECKING:
    import sqlite3

    from trimesh._runtime.life.proc import Proc
    from trimesh._wire.observed import MetricRow, ProcView, SampleRow


_USED: Final = ("memory_bytes", "cpu_seconds", "gpu_percent", "gpu_memory_bytes")
_SEEN: Final = {"procs": ("id",), "actors": ("proc", "name", "incarnation"), "calls": ("id",)}
_LOG_PAGES: Final = 256
"""Pages, of 4 KiB each, that SQLite writes beside the file before it moves them there."""
_BATCHES_CHECKED: Final = 16
_KEPT_OF_ROWS: Final = 0.875


class HistoryFile:
    """Writer of one file. Its methods may run in another thread than the one that made it, one at a time.

    Args:
        path: The file, which is made on first use.
        seconds: Age up to which rows are kept.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, seconds: float = limits.HISTORY_SECONDS) -> None:
        self.path = path
        self._seconds = seconds
        self._db: sqlite3.Connection | None = None
        self._series: dict[tuple[str, str, str, int], list[Any]] = {}
        self._marks = deque[tuple[float, int]]()
        self._events: dict[str, int] = {}
        self._used_at = self._pruned_at = -math.inf
        self._known: dict[str, set[tuple[Any, ...]]] = {table: set() for table in _SEEN}

    def write(self, batch: SampleBatch) -> None:
        """Write a batch; remove what is too old.

        Raises:
            sqlite3.Error: The file cannot be written.
        """
        db = self._opened()
        with db:
            self._write_rows(db, batch)
            self._write_events(db, batch.views)
            self._write_samples(db, batch)
            if batch.at >= self._pruned_at + limits.HISTORY_PRUNE_SECONDS:
                self._pruned_at = batch.at
                self._prune(db, batch.at)

    def fail(self, error: str) -> None:
        """Note the error by which the run was left.

        Raises:
            sqlite3.Error: The file cannot be written.
        """
        db = self._opened()
        with db:
            db.execute("UPDATE runs SET state = 'failed', error = ?", (error,))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            import sqlite3  # noqa: PLC0415 - short runs need none

            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.path, flags, 0o600))
            self._db = db = sqlite3.connect(self.path, check_same_thread=False)
            db.execute("PRAGMA synchronous = OFF")  # for a killed process, not for a failed machine
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {_LOG_PAGES * 4_096}")
            db.execute("PRAGMA cache_size = -1024")
            db.executescript(schema())
        return self._db

    # ---- rows ------------------------------------------------------------------------------------------------

    def _write_rows(self, db: sqlite3.Connection, batch: SampleBatch) -> None:
        at, views = batch.at, batch.views
        job = views[0].job if views else None
        if job is not None:
            run = (job.id, job.pid, job.host, job.command, job.started_at, at, job.state)
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, '') ON CONFLICT DO UPDATE SET "
                "seen_at = excluded.seen_at, state = excluded.state",
                run,
            )
        procs = _procs(views, at)
        self._see(db, "procs", procs, at, ("state", *_USED))
        self._see(db, "actors", _actors(views, at), at, ("state", "queued", "running"))
        self._see(db, "calls", _calls(views, at), at, ("state", "at"))
        if at >= self._used_at + limits.HISTORY_USAGE_SECONDS:
            self._used_at = at
            used = [(at, row["id"], *(row[name] for name in _USED)) for row in procs if row["memory_bytes"]]
            db.executemany("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)", used)

    def _see(
        self, db: sqlite3.Connection, table: str, rows: Sequence[dict[str, Any]], at: float, changing: Iterable[str]
    ) -> None:
        """Insert rows or update those that are there; mark those as gone that are not seen any more."""
        key = _SEEN[table]
        seen = {tuple(row[name] for name in key) for row in rows}
        gone = self._known[table] - seen
        self._known[table] = seen
        if rows:
            names = list(rows[0])
            changes = ", ".join(f'"{name}" = excluded."{name}"' for name in ("seen_at", *changing))
            columns, values = ", ".join(f'"{name}"' for name in names), ", ".join(f":{name}" for name in names)
            db.executemany(
                f"INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT DO UPDATE SET {changes}",  # noqa: S608 - names of ours
                rows,
            )
        if gone:
            where = " AND ".join(f'"{name}" = ?' for name in key)
            state = "ended" if table == "calls" else "gone"
            db.executemany(
                f"UPDATE {table} SET state = '{state}' WHERE {where} AND state NOT IN ('dead', 'ended')",  # noqa: S608 - the same
                sorted(gone),
            )

    def _write_events(self, db: sqlite3.Connection, views: Sequence[ProcView]) -> None:
        for view in views:
            proc, last = view.proc.id, self._events.get(view.proc.id, 0)
            for event in view.events:
                if event.number > last:
                    place = (event.name, event.mesh, json.dumps(event.point), event.incarnation)
                    row = (event.at, proc, event.number, event.kind, *place, event.text, event.is_failure)
                    db.execute("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                    self._events[proc] = event.number
        if len(self._events) > limits.HISTORY_TABLE_ROWS:
            self._events.clear()

    # ---- metrics ---------------------------------------------------------------------------------------------

    def _write_samples(self, db: sqlite3.Connection, batch: SampleBatch) -> None:
        found = list[tuple[Any, ...]]()
        for sample in batch.samples:
            for metric, value in sample.values.items():
                series = self._series_of(db, metric, "value", sample)
                found.append((series[0], sample.at, sample.step, value, None))
        for view in batch.views:
            for row in view.metrics:
                if row.kind == "value":
                    continue
                series, count = self._series_of(db, row.metric, row.kind, row), sum(row.counts)
                if series[1:] != [row.value, count]:
                    series[1:] = [row.value, count]
                    found.append((series[0], batch.at, None, row.value, count if row.counts else None))
        db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", found)
        if found:
            [[last]] = db.execute("SELECT max(rowid) FROM samples")
            self._marks.append((batch.at, last))

    def _series_of(self, db: sqlite3.Connection, metric: str, kind: str, row: SampleRow | MetricRow) -> list[Any]:
        """Return number, last value and last count of a series."""
        key = (metric, row.proc, row.name, row.incarnation)
        found = self._series.get(key)
        if found is None:
            if len(self._series) >= limits.HISTORY_SERIES:
                self._series.clear()
            where = "metric = ? AND proc = ? AND name = ? AND incarnation = ?"
            known = db.execute(f"SELECT id FROM series WHERE {where}", key).fetchone()  # noqa: S608 - a literal
            if known is None:
                [[last]] = db.execute("SELECT max(ifnull((SELECT max(id) FROM series), 0), 0)")
                place = (row.name, row.mesh, json.dumps(row.point), row.incarnation)
                db.execute(
                    "INSERT INTO series VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (last + 1, metric, kind, row.proc, *place)
                )
                known = (last + 1,)
            found = self._series[key] = [known[0], None, None]
        return found

    # ---- bounds ----------------------------------------------------------------------------------------------

    def _prune(self, db: sqlite3.Connection, now: float) -> None:
        oldest = now - self._seconds
        upto = 0
        while self._marks and self._marks[0][0] < oldest:
            upto = self._marks.popleft()[1]
        last = self._marks[-1][1] if self._marks else upto
        self._remove_samples(db, max(upto, last - limits.HISTORY_SAMPLES))
        for table in TABLES:
            columns = [name for name, _, _ in table.columns]
            when = "seen_at" if "seen_at" in columns else "at" if table.name in ("usage", "events") else ""
            if when:
                db.execute(f"DELETE FROM {table.name} WHERE {when} < ? AND NOT ({table.keeps})", (oldest,))  # noqa: S608 - names of ours
                db.execute(
                    f"DELETE FROM {table.name} WHERE {when} < (SELECT {when} FROM {table.name} "  # noqa: S608 - the same
                    f"ORDER BY {when} DESC LIMIT 1 OFFSET {limits.HISTORY_TABLE_ROWS})"
                )
        for _ in range(_BATCHES_CHECKED):
            if _used_bytes(db) <= limits.HISTORY_BYTES:
                break
            [[first]] = db.execute("SELECT ifnull(min(rowid), 0) FROM samples")
            self._remove_samples(db, int(last - (last - first) * _KEPT_OF_ROWS))
            db.execute("DELETE FROM events WHERE at < (SELECT avg(at) FROM events)")
            db.execute("DELETE FROM usage WHERE at < (SELECT avg(at) FROM usage)")
        db.execute("DELETE FROM series WHERE id NOT IN (SELECT series FROM samples)")
        self._series.clear()

    def _remove_samples(self, db: sqlite3.Connection, upto: int) -> None:
        if upto > 0:
            db.execute("DELETE FROM samples WHERE rowid <= ?", (upto,))


def _used_bytes(db: sqlite3.Connection) -> int:
    [[size]], [[pages]], [[free]] = (
        db.execute(f"PRAGMA {one}") for one in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))


def _place(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "mesh": row.mesh,
        "point": json.dumps(row.point),
        "incarnation": getattr(row, "incarnation", 0),
    }


def _procs(views: Sequence[ProcView], at: float) -> list[dict[str, Any]]:
    own = {view.proc.id: view.proc for view in views}
    found = {child.id: child for view in views for child in view.children}
    if views:
        found[views[0].proc.id] = views[0].proc
    return [
        {
            "id": row.id,
            "parent": row.parent,
            **_place(row),
            "pid": row.pid,
            "host": row.host,
            "state": row.state,
            "began_at": at,
            "seen_at": at,
            **{name: getattr(own.get(row.id, row), name) for name in _USED},
        }
        for row in found.values()
    ]


def _actors(views: Sequence[ProcView], at: float) -> list[dict[str, Any]]:
    return [
        {
            "proc": row.proc,
            **_place(row),
            "cls": row.cls,
            "state": row.state,
            "began_at": at,
            "seen_at": at,
            "queued": row.queued,
            "running": row.running,
        }
        for view in views
        for row in view.actors
    ]


def _calls(views: Sequence[ProcView], at: float) -> list[dict[str, Any]]:
    found = dict[str, dict[str, Any]]()
    for row in _oldest_calls(views):
        place = _place(row)
        del place["incarnation"]
        found[row.id] = {
            "id": row.id,
            "proc": row.proc,
            **place,
            "endpoint": row.endpoint,
            "caller": row.caller,
            "state": row.state,
            "began_at": at - row.age,
            "seen_at": at,
            "at": row.at,
        }
    return list(found.values())


def _oldest_calls(views: Sequence[ProcView]) -> Iterator[Any]:
    """Yield calls that have lasted for a look, those of callees last: they know more."""
    calls = [
        (row.proc == view.proc.id, row) for view in views for row in view.calls if row.age >= limits.SAMPLING_SECONDS
    ]
    calls.sort(key=lambda one: (one[0], one[1].age))
    yield from (row for _, row in calls[-limits.OBSERVED_CALLS :])


# ---- the history of a controller -------------------------------------------------------------------------------------


class KeptHistory:
    """History of a controller while it runs.

    Args:
        folder: Folder of the flight records.
        seconds: Age up to which rows are kept.
    """

    def __init__(self, proc: Proc, folder: Path, seconds: float) -> None:
        self._proc = proc
        self._history = HistoryFile(folder / HISTORY_FILE, seconds)
        self._sink: SinkThread | None = None

    async def keep(self) -> None:
        """Begin when the run is `limits.HISTORY_BEGIN_SECONDS` old."""
        await trio.sleep(limits.HISTORY_BEGIN_SECONDS)
        self._sink = SinkThread(self._history.write, f"the history {self._history.path}")
        sampling_of(self._proc).add(self._sink)

    def end(self, error: str) -> None:
        """End the history. Blocking: at most `limits.HISTORY_END_SECONDS`.

        Args:
            error: The error of the run; empty if it ended well: then the last rows are not written.
        """
        if self._sink is None:
            return
        if error:  # what members sent when they ended
            proc = self._proc
            self._sink.take(
                SampleBatch(proc.metrics.now(), [look(proc), *proc.inquiries.take_last()], take_samples(proc))
            )
        else:
            self._sink.drop_all()
        self._sink.end(limits.HISTORY_END_SECONDS, last=partial(self._finish, error))

    def _finish(self, error: str) -> None:
        if error:
            self._history.fail(error)
        self._history.close()
