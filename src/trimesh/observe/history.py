"""Queries in SQL of a run's history: rows, events and metrics of its last hour, also after its death."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trimesh import limits
from trimesh._runtime.recording import HISTORY_FILE
from trimesh.errors import ConnectError
from trimesh.observe.run_snapshot import is_alive_run, recorded_runs

if TYPE_CHECKING:
    import sqlite3

_BROKEN: Final = (11, 26)
"""Codes of SQLite for a file that is damaged (SQLITE_CORRUPT), or no database (SQLITE_NOTADB)."""

_STEPS: int = 10_000
"""Steps of SQLite's machine between two looks at the time limit."""


class QueryResult(msgspec.Struct, frozen=True):
    """Rows of a query.

    Attributes:
        columns: Names of the columns.
        rows: The rows, a value for each column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict: what `pandas.DataFrame` and `polars.DataFrame` take."""
        for row in self.rows:
            yield dict(zip(self.columns, row, strict=True))


def query(
    sql: str, parameters: Sequence[object] | Mapping[str, object] = (), *, pid: int | None = None, run: str = ""
) -> QueryResult:
    """Query the history of a run in SQL: `observe.query("select * from metrics where metric = 'loss'")`.

    It has the last hour up to a second ago, also of what has ended, and stays after the run has died. Runs that end
    without an error remove it. docs/operate.md lists the tables.

    Args:
        sql: One statement that reads. Quote values by `parameters`: `where mesh = ?`.
        parameters: Values of its placeholders.
        pid: Process id of the controller; None for this program's own run, else the only living run, else the newest.
        run: Folder of the flight records of a run.

    Raises:
        ConnectError: There is no such history, or several runs live.
        ValueError: The statement is wrong, writes, takes longer than `limits.HISTORY_QUERY_SECONDS`, or has more than
            `limits.HISTORY_QUERY_ROWS` rows.

    Blocking: some milliseconds, no checkpoint: in Trio, use `trio.to_thread.run_sync`.
    """
    import sqlite3  # noqa: PLC0415 - snapshots need none

    path = _found(pid, run)
    try:
        db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=limits.HISTORY_QUERY_SECONDS)
    except sqlite3.Error as error:
        raise ConnectError(f"cannot open the history {path}: {error}") from error
    try:
        ends_at = time.monotonic() + limits.HISTORY_QUERY_SECONDS
        db.set_progress_handler(lambda: time.monotonic() > ends_at, _STEPS)
        db.set_authorizer(_allow)
        given: Any = parameters
        found = db.execute(sql, given)
        rows = found.fetchmany(limits.HISTORY_QUERY_ROWS + 1)
        columns = tuple(one[0] for one in found.description or ())
    except (sqlite3.Error, sqlite3.Warning, TypeError) as error:
        if type(error) is sqlite3.DatabaseError and getattr(error, "sqlite_errorcode", 0) in _BROKEN:
            raise ConnectError(f"the history {path} cannot be read: {error}") from error
        raise ValueError(_refused(error, db, sql)) from error
    finally:
        db.close()
    if len(rows) > limits.HISTORY_QUERY_ROWS:
        raise ValueError(
            f"a result has at most {limits.HISTORY_QUERY_ROWS} rows, got more: add LIMIT or group the rows"
        )
    return QueryResult(columns, tuple(rows))


def _allow(action: int, first: str | None, *_: object) -> int:
    """Allow what reads; ATTACH could make other files."""
    import sqlite3  # noqa: PLC0415 - as above

    reads = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    is_schema = action == sqlite3.SQLITE_PRAGMA and first in ("table_info", "table_list", "user_version")
    return sqlite3.SQLITE_OK if action in reads or is_schema else sqlite3.SQLITE_DENY


def _refused(error: Exception, db: sqlite3.Connection, sql: str) -> str:
    text = str(error)
    if text == "interrupted":
        return (
            f"a query takes at most {limits.HISTORY_QUERY_SECONDS:g} s, got a longer one: narrow it by `at` or `metric`"
        )
    if text in ("not authorized", "authorization denied") or text.startswith("attempt to write"):
        return "a query only reads: write one SELECT"
    if text.startswith(("no such table", "no such column")):
        db.set_authorizer(None)
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        columns = {name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")] for name in sorted(names)}
        wanted = text.rpartition(": ")[2].rpartition(".")[2]
        known = columns if "table" in text else {one for of in columns.values() for one in of}
        meant = "".join(f"; did you mean {one}?" for one in get_close_matches(wanted, known, n=1))
        if "column" in text:  # of the tables that the statement names
            columns = {name: of for name, of in columns.items() if name in sql} or columns
        tables = "\n".join(f"  {name} ({', '.join(of)})" for name, of in columns.items())
        return f"{text}{meant}\nthe tables are\n{tables}"
    return f"a query must be one statement of SQLite that reads: {text}"


def _found(pid: int | None, run: str) -> Path:
    if run:
        path = Path(run) / HISTORY_FILE
        if not path.exists():
            raise ConnectError(
                f"{run} has no history: name a run by its number or folder, as `trimesh autopsy` prints them"
            )
        return path.absolute()
    folders = [one for one in recorded_runs() if (one.path / HISTORY_FILE).exists()]
    if pid is None:
        living = [one for one in folders if is_alive_run(one)]
        own = [one for one in living if one.pid == os.getpid()]
        if not own and len(living) > 1:
            known = ", ".join(str(one.pid) for one in living)
            raise ConnectError(
                f"a run must be named by the pid of its controller if several live, got none of {known}: write "
                f"--pid {living[0].pid} on the command line, query(..., pid={living[0].pid}) in Python"
            )
        folders = own or living or folders
    else:
        folders = [one for one in folders if one.pid == pid]
    if not folders:
        raise ConnectError(
            f"{'no run' if pid is None else f'no run of process {pid}'} has a history on this machine: it begins when "
            f"a run is {limits.HISTORY_BEGIN_SECONDS:g} s old, needs a flight record and TRIMESH_HISTORY > 0; a run "
            "that ends well removes its own"
        )
    return folders[0].path / HISTORY_FILE
