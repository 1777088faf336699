"""History of a run: rows, events and metrics in SQL, while it lives and after it has died (Q15)."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend

import trimesh
from trimesh import Actor, ConnectError, Isolate, endpoint, limits, observe, telemetry, this_host
from trimesh._runtime.flight_feed import FlightRecord
from trimesh._runtime.history import HistoryFile
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.sampling import SampleBatch, SinkThread, sampling_of
from trimesh._wire.history import documented
from trimesh._wire.observed import ProcRow, ProcView, SampleRow
from trimesh.config import configured

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"


class Trainer(Actor):
    @endpoint
    def step(self, number: int) -> None:
        trimesh.log({"loss": 1 / (number + 1)}, step=number)
        telemetry.counter("tokens").add(512)
        telemetry.histogram("seconds").record(0.5)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that begins with its run, and is written without a pause."""
    monkeypatch.setattr(limits, "HISTORY_BEGIN_SECONDS", 0.0)
    monkeypatch.setattr(limits, "SAMPLING_SECONDS", 0.01)
    monkeypatch.setattr(limits, "SAMPLING_SHARE", 1.0)


async def rows(sql: str, count: int, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a query once there are so many."""
    while True:
        try:
            found = await trio.to_thread.run_sync(lambda: list(observe.query(sql, **options).dicts()))
        except (ConnectError, ValueError):  # not begun yet
            found = []
        if len(found) >= count:
            return found


def written_runs(folder: Path) -> list[Path]:
    return list((folder / ".records").glob("*"))


@pytest.mark.real
@pytest.mark.daily
@pytest.mark.usefixtures("at_once")
async def test_rows_of_what_has_ended_stay(folder: Path):
    """Q15: while the run lives, and after it has failed; a run that ends well leaves nothing."""
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="no")):
        async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
            trainers = await procs.spawn("trainers", Trainer)
            for number in range(3):
                await trainers.step.call(number)
            loss = "select name, step, value, point ->> 'gpus' as rank from metrics where metric = 'loss'"
            found = await rows(loss, 6)
            assert {(row["name"], row["step"]) for row in found} == {
                (f"trainers[gpus={rank}]", step) for rank in range(2) for step in range(3)
            }
            reached = f"having max(value) >= {3 * 512}"  # the newest value of a counter comes with the next sample
            [tokens] = await rows(f"select max(value) from metrics where metric = 'tokens' {reached}", 1)
            assert tokens["max(value)"] == 3 * 512
            await procs.kill([{"gpus": 1}])
            await rows("select * from events where kind = 'Died'", 1)
            await trainers.slice(gpus=0).step.call_one(9)
            raise ValueError("no")
    [run] = written_runs(folder)
    assert observe.query("select value from metrics where step = 9", run=str(run)).rows == ((0.1,),)
    [[error]] = observe.query("select error from runs").rows
    assert error == "ValueError: no"
    states = dict(observe.query("select name, state from procs where name != 'controller'").rows)
    assert set(states) == {"procs[gpus=0]", "procs[gpus=1]"}
    assert states["procs[gpus=1]"] in ("dead", "gone")
    assert {path.stat().st_mode & 0o777 for path in run.glob("history*")} == {0o600}


@pytest.mark.real
@pytest.mark.usefixtures("at_once")
async def test_run_that_ends_well_removes_its_history(folder: Path):
    """Q15: with its flight records."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        await (await procs.spawn("trainers", Trainer)).step.call(0)
        await rows("select * from procs", 2)
    assert written_runs(folder) == []
    with pytest.raises(ConnectError, match="no run has a history on this machine"):
        observe.query("select 1")


@pytest.mark.real
async def test_run_goes_on_without_a_history_that_finds_no_descriptor(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    """Q15: the limit strikes as the module of the history is loaded, beside the spawner's start."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    keep = FlightRecord.keep_history

    async def keep_without_descriptors(record: FlightRecord, seconds: float) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            await keep(record, seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    monkeypatch.delitem(sys.modules, "trimesh._runtime.history")
    monkeypatch.setattr(FlightRecord, "keep_history", keep_without_descriptors)
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        await (await procs.spawn("trainers", Trainer)).step.call(0)
    assert "no history of this run is kept: " in caplog.text
    assert "Too many open files" in caplog.text


@pytest.mark.real
@pytest.mark.usefixtures("at_once")
async def test_no_history_is_kept_where_the_setting_says_so(folder: Path):
    """Q15: nor where there is no flight record."""
    with configured(history=0):
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            await (await procs.spawn("trainers", Trainer)).step.call(0)
            [run] = written_runs(folder)
            assert not list(run.glob("history*"))


@pytest.mark.real
@pytest.mark.daily
@pytest.mark.usefixtures("at_once")
async def test_what_does_not_only_read_is_refused():
    """Q15: so is a statement with a wrong name, with those that there are."""
    async with this_host().spawn_procs({"gpus": 1}):
        await rows("select * from procs", 2)
        for statement in ("delete from procs", "attach 'x' as y", "pragma journal_mode = delete", "vacuum"):
            with pytest.raises(ValueError, match="a query only reads"):
                observe.query(statement)
        with pytest.raises(
            ValueError, match=r"(?s)no such table: proc; did you mean procs\?\n.*  actors \(proc, name, .*\n  usage \("
        ):
            observe.query("select * from proc")
        with pytest.raises(ValueError, match="0 supplied"):
            observe.query("select * from procs where id = ?")
        assert observe.query("select count(*) as n from procs where name = ?", ["controller"]).rows == ((1,),)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def batches(seconds: int, ranks: int) -> Iterator[SampleBatch]:
    for second in range(seconds):
        samples = [
            SampleRow(
                at=float(second), proc=f"{rank:x}", name=f"t[gpus={rank}]", values={"a": second, "b": rank}, mesh="t"
            )
            for rank in range(ranks)
        ]
        views = [
            ProcView(proc=ProcRow(id=f"{rank:x}", name=f"p[gpus={rank}]", memory_bytes=1)) for rank in range(ranks)
        ]
        yield SampleBatch(float(second), views, samples)


def size_of(path: Path) -> int:
    return sum(os.path.getsize(one) for one in path.parent.glob(f"{path.name}*"))


def test_number_and_bytes_of_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Q15: the newest stay."""
    monkeypatch.setattr(limits, "HISTORY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "HISTORY_PRUNE_SECONDS", 10.0)
    path = tmp_path / "history.sqlite"
    history, sizes = HistoryFile(path), list[int]()
    for batch in batches(1_000, 64):
        history.write(batch)
        sizes.append(size_of(path))
    history.close()
    assert max(sizes) < 3 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimesh.observe.history.HISTORY_FILE", path.name)
        [[first, last]] = observe.query("select min(at), max(at) from samples", run=str(tmp_path)).rows
    assert last == 999
    assert first > 0


@pytest.mark.slow
def test_long_simulated_run_keeps_file_and_memory_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Q15: under a virtual clock, by a history of two minutes."""
    monkeypatch.setattr(limits, "METRIC_SAMPLES_COLLECTED", 200)
    path = tmp_path / "history.sqlite"
    seen = list[tuple[int, int]]()

    async def main() -> None:
        backend = SimBackend()
        async with backend.open(), backend.procs() as procs:
            trainers = await procs.spawn("trainers", Trainer)
            history = HistoryFile(path, seconds=120.0)
            sink = SinkThread(history.write, "the history", is_inline=True)
            sampling = sampling_of(current_proc())
            sampling.add(sink)
            for second in range(800):
                await trainers.step.call(second)
                await trio.sleep(1)
                if second in (400, 799):
                    gc.collect()
                    seen.append((size_of(path), len(gc.get_objects())))
            sampling.remove(sink)
            sink.end(0.0)
            history.close()

    SimBackend().run(main)
    (early_bytes, early_objects), (late_bytes, late_objects) = seen
    assert late_bytes <= early_bytes * 1.1
    assert late_objects <= early_objects * 1.05
    steps = observe.query("select min(step), max(step) from samples", run=str(tmp_path)).rows
    assert steps[0][1] >= 798
    assert 600 < steps[0][0] < 700


def test_page_lists_the_tables():
    """`docs/operate.md` has them as the schema does."""
    assert documented() in PAGE.read_text()
