"""Flight records and histories of runs: how they are found, what fills the gaps of a snapshot (Q6, Q7, Q15)."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.rows import rows

from trimesh import ConnectError, limits, observe
from trimesh._runtime.history import HistoryFile
from trimesh._runtime.recording import HISTORY_FILE, FlightRecorder
from trimesh._runtime.sampling import SampleBatch
from trimesh._runtime.system.exits import start_of
from trimesh._transport.native.carriers import boot_id
from trimesh._wire import flight
from trimesh._wire.observed import ActorRow, JobRow, ProcRow, ProcView, SampleRow
from trimesh.observe.run_snapshot import unanswered, with_records


def record(path: Path, *records: flight.Record, is_alive: bool = False, has_ended: bool = False, **head: Any) -> Path:
    """Write a flight record, of this process if it is alive."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    proc = ProcRow(id=path.name, pid=os.getpid())
    ticks = start_of(os.getpid()) or 0
    life = {"boot": boot_id() if is_alive else "another", "ticks": ticks}
    recorder = FlightRecorder(path, flight.FlightHead(**{"proc": proc, "started_at": 1.0, **life, **head}), lambda: 0.0)
    for one in records:
        recorder.note(one)
    recorder.end() if has_ended else recorder.forget()
    return path


@pytest.fixture
def runs(folder: Path) -> Path:
    """The folder that has the folders of runs."""
    folder.mkdir(mode=0o700)
    (folder / ".records").mkdir(mode=0o700)
    return folder / ".records"


def run(runs: Path, pid: int, begun_at: int, *, is_alive: bool = False, history: bool = False) -> Path:
    """Write the records of a run: its controller's, and one of a process that has ended well."""
    path = runs / f"{begun_at:013d}-{pid}-c0"
    job = JobRow(id="c0", pid=pid, host="here")
    record(path / "1", is_alive=True, has_ended=True)
    record(path / "c0", is_alive=is_alive, job=job)
    if history:
        with closing(sqlite3.connect(path / HISTORY_FILE)) as db:
            db.execute("create table marks (pid)")
            db.execute("insert into marks values (?)", (pid,))
            db.commit()
    return path


# ---- flight records --------------------------------------------------------------------------------------------------


def test_newest_dead_run_is_found_or_the_one_that_is_named(runs: Path) -> None:
    """Q7: a living one by its number only."""
    paths = {pid: run(runs, pid, at, is_alive=pid == 400) for at, pid in enumerate((100, 200, 300, 400))}
    found = observe.find_records()
    assert (found.folder, found.is_running, set(found.flights), found.unreadable) == (
        paths[300],
        False,
        {"1", "c0"},
        {},
    )
    assert found.root is found.flights["c0"]
    assert observe.find_records(pid=200).folder == paths[200]
    assert observe.find_records(str(paths[100])).folder == paths[100]
    living = observe.find_records(pid=400)
    assert (living.folder, living.is_running) == (paths[400], True)


def test_run_that_is_not_found_is_refused_with_those_that_are(runs: Path) -> None:
    """Q7: the one that is meant, else the newest."""
    with pytest.raises(ConnectError, match=r"^no failed run has left flight records on this machine; a run that ends"):
        observe.find_records()
    with pytest.raises(ConnectError, match=r"^no run of process 7 has .*; no run has left records on this machine$"):
        observe.find_records(pid=7)
    for at, pid in enumerate((100, 200, 300, 400, 500, 600)):
        (runs / f"{at:013d}-{pid}-c0").mkdir()
    with pytest.raises(ConnectError, match=r"^no run of process 201 has left .*; did you mean 200[?]$"):
        observe.find_records(pid=201)
    with pytest.raises(ConnectError, match=r"; the newest runs that have records: 600, 500, 400, 300, 200$"):
        observe.find_records(pid=99_999)
    near = runs / f"{2:013d}-301-c0"
    with pytest.raises(
        ConnectError, match=rf"cannot be read: No such file .*; did you mean {runs}/0000000000002-300-c0"
    ):
        observe.read_records(near)
    with pytest.raises(ConnectError, match=r"; the newest runs that have records: 600, "):
        observe.read_records(Path("/none"))
    runs.chmod(0o755)
    with pytest.raises(ConnectError, match=r"^flight records of this user cannot be listed: .* mode 0700"):
        observe.find_records()
    with pytest.raises(ConnectError, match=r"No such file or directory$"):
        observe.read_records(Path("/none"))


def test_files_that_are_no_records_are_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q7: a run lives while one of its records is open; its controller may be on another host."""
    path = run(runs, 100, 1)
    record(path / "2", is_alive=True)
    (path / "f00").write_bytes(b"rubbish" * 1_000)
    found = observe.read_records(path)
    assert (set(found.flights), set(found.unreadable), found.is_running) == ({"1", "2", "c0"}, {"f00"}, True)
    assert "of version" in found.unreadable["f00"]
    (path / "c0").unlink()
    assert observe.read_records(path).root is None
    monkeypatch.setattr(limits, "RECORD_FILES_MAX", 1)
    assert set(observe.read_records(path).flights) == {"1"}
    for number, files in ((1, "1 file"), (2, "2 files")):
        other = runs / f"{number:013d}-9-c0"
        monkeypatch.setattr(limits, "RECORD_FILES_MAX", 9)
        other.mkdir()
        for name in range(number):
            (other / f"{name}").write_bytes(b"")
        with pytest.raises(ConnectError, match=rf"^there is no flight record in .*: {files} cannot be read as one; "):
            observe.read_records(other)
    (runs / "empty").mkdir()
    with pytest.raises(ConnectError, match=r"^there is no flight record in [^:;]*/empty; "):
        observe.read_records(runs / "empty")


def test_record_of_one_process_is_read(tmp_path: Path) -> None:
    assert observe.read_record(str(record(tmp_path / "1"))).head.proc.id == "1"
    (tmp_path / "2").write_bytes(b"rubbish" * 1_000)
    for path, text in (
        ("", "keeps no"),
        (tmp_path / "3", "is not on this machine"),
        (tmp_path / "2", "cannot be read: "),
    ):
        with pytest.raises(ValueError, match=text):
            observe.read_record(path)


def test_silent_processes_are_completed_from_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UA-1, UA-2: those that have not answered; what owner and process report counts first."""
    actor = ActorRow(proc="1", name="a", mesh="a")
    seen = flight.SeenView(
        at=1.0, trio_at=0.0, every=1.0, view=ProcView(proc=ProcRow(id="1", memory_bytes=7), actors=(actor,))
    )
    path = str(record(tmp_path / "1", seen))
    empty = str(record(tmp_path / "2"))
    states = {"1": "running", "2": "stopped", "3": "running", "4": "dead", "5": "held", "6": "exiting"}
    children = [
        ProcRow(id=one, parent="0", state=state, record=empty if one == "2" else path) for one, state in states.items()
    ]
    children[4] = structs.replace(children[4], record=str(tmp_path / "gone"))
    children.append(ProcRow(id="7", parent="0"))
    views = [
        ProcView(proc=ProcRow(id="0", pid=9), children=tuple(children)),
        ProcView(proc=ProcRow(id="3", pid=9)),
        ProcView(proc=ProcRow(id="6", stack="File x", state="stuck", memory_bytes=8)),
    ]
    assert set(unanswered(views)) == {"1", "2", "5", "6"}
    found = with_records(views)
    assert found[:2] == views[:2]
    assert [(one.proc.id, one.proc.state, one.proc.memory_bytes, one.proc.record, one.actors) for one in found[2:]] == [
        ("6", "stuck", 8, path, (actor,)),
        ("1", "silent", 7, path, (actor,)),
        ("2", "silent", 0, empty, ()),
    ]
    assert found[2].proc.stack == "File x"
    monkeypatch.setattr(limits, "OBSERVED_RECORDS", 1)
    assert [one.proc.id for one in with_records(views)] == ["0", "3", "6", "1"]


# ---- histories -------------------------------------------------------------------------------------------------------


def pid_of(**options: Any) -> int:
    [[pid]] = observe.query("select pid from marks", **options).rows
    return pid


def test_history_is_that_of_the_run_that_is_meant(runs: Path) -> None:
    """Q15: this program's, else the only living run's, else the newest; or the one that is named."""
    text = "has a history on this machine: it begins when a run is .* s old"
    with pytest.raises(ConnectError, match=rf"^no run {text}"):
        observe.query("select 1")
    run(runs, 100, 1, history=True)
    run(runs, 200, 3, history=True)
    run(runs, 250, 4)
    assert pid_of() == 200
    assert pid_of(pid=100) == 100
    with pytest.raises(ConnectError, match=rf"^no run of process 250 {text}"):
        observe.query("select 1", pid=250)
    path = run(runs, 300, 2, is_alive=True, history=True)
    assert pid_of() == 300
    run(runs, 400, 5, is_alive=True, history=True)
    with pytest.raises(ConnectError, match=r"got none of 400, 300: write --pid 400 on .*, query\(..., pid=400\) in"):
        observe.query("select 1")
    run(runs, os.getpid(), 0, is_alive=True, history=True)
    assert pid_of() == os.getpid()
    assert pid_of(run=str(path)) == 300
    with pytest.raises(ConnectError, match=r"^/none has no history: name a run by its number or folder"):
        observe.query("select 1", run="/none")


ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"


@rows(
    "statement, text",
    [
        ("select 1; select 2", "^a query must be one statement of SQLite that reads: "),
        ("choose 1", "^a query must be one statement of SQLite that reads: .*syntax error"),
        ("insert into samples (at) values (1)", "^a query only reads: write one SELECT$"),
        ("pragma journal_mode", "^a query only reads: write one SELECT$"),
        (
            "select * from sample",
            r"(?s)^no such table: sample; did you mean samples\?\nthe tables are\n  actors \(.*  runs \(",
        ),
        ("select * from xyz", r"^no such table: xyz\nthe tables are\n  actors \("),
        (
            "select valued from samples",
            r"^no such column: valued; did you mean value\?\nthe tables are\n  samples \([^\n]*\)$",
        ),
        (
            "select s.valued from samples as s",
            r"^no such column: s.valued; did you mean value\?\nthe tables are\n  samples \(",
        ),
        (
            "select valued",
            r"(?s)^no such column: valued; did you mean value\?\nthe tables are\n  actors \(.*  samples \(",
        ),
        ("select * from samples", "^a result has at most 3 rows, got more: add LIMIT or group the rows$"),
        (ENDLESS, "^a query takes at most 0 s, got a longer one: narrow it by `at` or `metric`$"),
    ],
)
def test_wrong_query_is_refused_in_words(
    statement: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q15: with the tables and columns that there are."""
    samples = tuple(SampleRow(at=float(at), proc="1", name="t", values={"loss": at}) for at in range(4))
    file = HistoryFile(tmp_path / HISTORY_FILE)
    if not file.path.exists():
        file.write(SampleBatch(1.0, (), samples))
        file.close()
    monkeypatch.setattr(limits, "HISTORY_QUERY_ROWS", 3)
    if statement == ENDLESS:
        monkeypatch.setattr(limits, "HISTORY_QUERY_SECONDS", 0.0)
    with pytest.raises(ValueError, match=text):
        observe.query(statement, run=str(tmp_path))


def test_query_has_columns_and_at_most_so_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q15: parameters by place or name; a file that is no database is none of the query's mistakes."""
    monkeypatch.setattr(limits, "HISTORY_QUERY_ROWS", 3)
    file = HistoryFile(tmp_path / HISTORY_FILE)
    samples = tuple(SampleRow(at=float(at), proc="1", name="t", values={"loss": at}) for at in range(4))
    file.write(SampleBatch(1.0, (), samples))
    file.close()
    where = {"run": str(tmp_path)}
    found = observe.query("select at, value as loss from samples where at > ? order by at", [0.5], **where)
    assert (found.columns, found.rows) == (("at", "loss"), ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)))
    assert next(found.dicts()) == {"at": 1.0, "loss": 1.0}
    assert observe.query("select max(at) from samples where at < :end", {"end": 2}, **where).rows == ((1.0,),)
    assert observe.query("pragma user_version", **where).rows == ((1,),)
    monkeypatch.setattr(limits, "HISTORY_QUERY_ROWS", 5)
    assert [row[1] for row in observe.query("pragma table_info(samples)", **where).rows][:2] == ["series", "at"]
    (tmp_path / HISTORY_FILE).write_bytes(b"rubbish" * 1_000)
    with pytest.raises(ConnectError, match=r"^the history .*history\.sqlite cannot be read: file is not a database$"):
        observe.query("select * from samples", **where)
