"""Tables of a run's history: one SQLite file, written by the controller, for queries in SQL."""

# Annotations are not texts here: msgspec would compile each of them in every new process.

from typing import Final

import msgspec

VERSION: Final = 1
"""Grows when a column is removed or changes its meaning: `PRAGMA user_version`."""


class Table(msgspec.Struct, frozen=True):
    """One table.

    Attributes:
        name: Its name.
        text: Meaning of a row.
        columns: Name, SQL type and meaning of each column.
        key: Columns that identify a row; empty for a table that only grows.
        keeps: Condition of rows that age does not remove.
    """

    name: str
    text: str
    columns: tuple[tuple[str, str, str], ...]
    key: tuple[str, ...] = ()
    keeps: str = "0"

    def sql(self) -> str:
        columns = [f'"{name}" {kind}' for name, kind, _ in self.columns]
        key = [f"PRIMARY KEY ({', '.join(self.key)})"] if self.key else []
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(columns + key)}){' WITHOUT ROWID' * bool(key)}"


_PLACE: Final = (
    ("name", "TEXT", "`mesh[label=0]`, or `controller`"),
    ("mesh", "TEXT", "its mesh"),
    ("point", "TEXT", "its coordinates as JSON: `point ->> 'gpus'`"),
    ("incarnation", "INTEGER", "0 for the first at its point"),
)
_LIFE: Final = (
    ("began_at", "REAL", "Unix time at which it was first seen"),
    ("seen_at", "REAL", "Unix time at which it was last seen"),
)

_USED: Final = (
    ("memory_bytes", "INTEGER", "resident memory"),
    ("cpu_seconds", "REAL", "processor time so far"),
    ("gpu_percent", "INTEGER", "use of the busiest GPU on which it has memory"),
    ("gpu_memory_bytes", "INTEGER", "its memory on GPUs"),
)

TABLES: Final = (
    Table(
        "runs",
        "the run",
        (
            ("id", "TEXT", "id of its controller"),
            ("pid", "INTEGER", "pid of its controller"),
            ("host", "TEXT", "its host"),
            ("command", "TEXT", "its command line"),
            *_LIFE,
            ("state", "TEXT", "running, stopping or failed"),
            ("error", "TEXT", "the error that it was left by"),
        ),
        ("id",),
        "1",
    ),
    Table(
        "procs",
        "a process",
        (
            ("id", "TEXT", "id of this incarnation"),
            ("parent", "TEXT", "the process that owns it"),
            *_PLACE,
            ("pid", "INTEGER", "its pid"),
            ("host", "TEXT", "its host"),
            ("state", "TEXT", "as in `trimesh ps`; `gone` once its owner knows it no more"),
            *_LIFE,
            *_USED,
        ),
        ("id",),
        "state NOT IN ('dead', 'gone')",
    ),
    Table(
        "actors",
        "an actor",
        (
            ("proc", "TEXT", "its process"),
            *_PLACE,
            ("cls", "TEXT", "its class"),
            ("state", "TEXT", "starting, serving, ended, or gone"),
            *_LIFE,
            ("queued", "INTEGER", "calls in its mailbox"),
            ("running", "INTEGER", "calls that run"),
        ),
        ("proc", "name", "incarnation"),
        "state NOT IN ('ended', 'gone')",
    ),
    Table(
        "calls",
        "a call to one member that was under way at a look",
        (
            ("id", "TEXT", "its id"),
            ("proc", "TEXT", "process of the member"),
            *_PLACE[:3],
            ("endpoint", "TEXT", "the endpoint"),
            ("caller", "TEXT", "who called"),
            ("state", "TEXT", "its last state"),
            *_LIFE,
            ("at", "TEXT", "the line at which it last was"),
        ),
        ("id",),
    ),
    Table(
        "usage",
        "resources of a process, every 10 s",
        (
            ("at", "REAL", "Unix time"),
            ("proc", "TEXT", "the process"),
            *_USED,
        ),
    ),
    Table(
        "events",
        "something that happened to a member",
        (
            ("at", "REAL", "Unix time"),
            ("proc", "TEXT", "the process that owns the member"),
            ("number", "INTEGER", "counts the events of that process"),
            ("kind", "TEXT", "Started, Died, Restarted, ..."),
            *_PLACE,
            ("text", "TEXT", "description"),
            ("is_failure", "INTEGER", "1 for a failure"),
        ),
        ("proc", "number"),
    ),
    Table(
        "series",
        "one metric of one member",
        (
            ("id", "INTEGER", "its number"),
            ("metric", "TEXT", "name of the metric"),
            ("kind", "TEXT", "value, counter, gauge or histogram"),
            ("proc", "TEXT", "the process"),
            *_PLACE,
        ),
        ("id",),
        "id IN (SELECT series FROM samples)",
    ),
    Table(
        "samples",
        "a value of a series",
        (
            ("series", "INTEGER", "the series"),
            ("at", "REAL", "Unix time"),
            ("step", "INTEGER", "step of a logged value"),
            ("value", "REAL", "the value, total of a counter, sum of a histogram; NULL for NaN"),
            ("count", "INTEGER", "number of values in a histogram"),
        ),
    ),
)

METRICS: Final = Table(
    "metrics",
    "a view: samples with the columns of their series",
    (
        ("at", "REAL", "Unix time"),
        ("step", "INTEGER", "step of a logged value"),
        ("metric", "TEXT", "name of the metric"),
        ("kind", "TEXT", "value, counter, gauge or histogram"),
        ("value", "REAL", "the value, total of a counter, sum of a histogram; NULL for NaN"),
        ("count", "INTEGER", "number of values in a histogram"),
        ("proc", "TEXT", "the process"),
        *_PLACE,
    ),
)


def schema() -> str:
    """Return the statements that make the tables."""
    columns = ", ".join(f"{name}" for name, _, _ in METRICS.columns)
    rows = f"SELECT {columns} FROM samples JOIN series ON samples.series = series.id"  # noqa: S608 - names of ours
    view = f"CREATE VIEW IF NOT EXISTS metrics AS {rows}"
    return ";\n".join([*(table.sql() for table in TABLES), view, f"PRAGMA user_version = {VERSION}", ""])


def documented() -> str:
    """Return the tables as a page shows them."""
    lines = ["| table | a row is | columns |", "|---|---|---|"]
    for table in (METRICS, *TABLES):
        columns = ", ".join(f"`{name}`" for name, _, _ in table.columns)
        lines.append(f"| `{table.name}` | {table.text} | {columns} |")
    return "\n".join(lines) + "\n"
