"""Batches on real processes: each row once, across restarts of loaders, resumes and other meshes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.data.conftest import ROWS
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, ProcDied, Restart, ShapeError, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")
pa = pytest.importorskip("pyarrow", reason="comes with the extra `data`")

from trimesh import data  # noqa: E402 - needs torch
from trimesh._runtime.life import current_proc  # noqa: E402 - as above
from trimesh.data import stream as streams  # noqa: E402 - as above
from trimesh.data.reading import Position, ReadingPlan  # noqa: E402 - as above
from trimesh.tensor.rank.moves import moves_of  # noqa: E402 - needs torch

pytestmark = [pytest.mark.torch, pytest.mark.real]

PRELOAD = ("torch", "torch.distributed.tensor")


async def numbers(batch: data.RowBatch) -> list[int]:
    found: list[int] = (await trimesh.fetch(batch["i"])).tolist()
    return found


async def rest_of(stream: data.DataStream) -> list[int]:
    return [row async for batch in stream for row in await numbers(batch)]


@pytest.mark.parametrize("read_by", ["this process", "loaders"])
async def test_each_row_comes_once_in_an_epoch_cut_along_the_mesh(parquet_files, read_by):
    source = data.parquet(parquet_files, columns=["i", "x", "tokens"])
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs,
        this_host().spawn_procs({"n": 2}, preload=("torch",)) as others,
    ):
        loaders = others if read_by == "loaders" else None
        async with data.open_stream(
            source, procs, batch=64, along="dp", seed=1, mixed_rows=100, pad={"tokens": data.Pad(3, -1)}, epochs=2,
            loaders=loaders,
        ) as stream:  # fmt: skip
            epochs: dict[int, list[int]] = {0: [], 1: []}
            async for batch in stream:
                rows = await numbers(batch)
                epochs[batch.epoch] += rows
                assert batch.rows == len(rows)
                assert await trimesh.placements(batch["x"]) == ["dp", None]
                assert (await trimesh.fetch(batch["x"])).tolist() == [[float(row)] * 3 for row in rows]
                expected = [(list(range(row % 5)) + [-1] * 3)[:3] for row in rows]
                assert (await trimesh.fetch(batch["tokens"])).tolist() == expected
            statistics = stream.statistics()

    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert epochs[0] != epochs[1] != list(range(ROWS))
    assert (statistics.batches, statistics.rows, statistics.bytes) == (10, 2 * ROWS, 2 * ROWS * (8 + 12 + 12))


async def test_a_stream_goes_on_from_a_state_on_a_mesh_of_another_size(parquet_files):
    source = data.parquet(parquet_files, columns=["i"])
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        async with data.open_stream(source, procs, batch=40, along="dp", seed=5, mixed_rows=50) as stream:
            whole = await rest_of(stream)
        async with data.open_stream(source, procs, batch=40, along="dp", seed=5, mixed_rows=50) as stream:
            first = await numbers(await anext(stream)) + await numbers(await anext(stream))
            state = stream.state_dict()  # more is made ready than was given

    async with this_host().spawn_procs({"dp": 3}, preload=PRELOAD) as procs:
        async with data.open_stream(source, procs, batch=70, along="dp", seed=5, mixed_rows=50) as stream:
            stream.load_state_dict(state)
            assert first + await rest_of(stream) == whole
        async with data.open_stream(source, procs, batch=70, along="dp", seed=6, mixed_rows=50) as stream:
            with pytest.raises(data.DataError, match="same seed="):
                stream.load_state_dict(state)
        other = data.parquet(parquet_files, columns=["i", "x"])
        async with data.open_stream(other, procs, batch=70, along="dp", seed=5, mixed_rows=50) as stream:
            with pytest.raises(data.DataError, match="over the same rows"):
                stream.load_state_dict(state)


@pytest.mark.daily
async def test_a_stream_moves_to_other_processes_without_a_row_lost_or_doubled(parquet_files):
    source = data.parquet(parquet_files, columns=["i"])
    async with (
        this_host().spawn_procs({"dp": 3}, preload=PRELOAD) as procs,
        data.open_stream(source, procs, batch=50, along="dp", prefetch=3) as stream,
    ):
        seen = await numbers(await anext(stream))
        stream.move_to(procs.slice(dp=slice(0, 2)), along="dp")
        second = await anext(stream)
        assert len(await trimesh.fetch(second["i"].local(["dp"]))) == 2
        seen += await numbers(second)
        stream.move_to(procs.slice(dp=1))
        seen += await rest_of(stream)
        with pytest.raises(ShapeError, match=r"along= must name dimensions of the mesh, .*, got 'tp'"):
            stream.move_to(procs, along="tp")

    assert seen == list(range(ROWS))


async def test_a_loader_that_is_killed_is_started_again_and_its_rows_are_read_again(parquet_files):
    source = data.parquet(parquet_files, columns=["i"])
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs,
        this_host().spawn_procs(
            {"n": 2}, preload=("torch",), supervision=Restart("one_for_one", intensity=50)
        ) as loaders,
        data.open_stream(source, procs, batch=30, along="dp", seed=2, mixed_rows=40, loaders=loaders) as stream,
    ):
        seen: list[int] = []
        for round_ in range(6):
            seen += await numbers(await anext(stream))
            await loaders.kill([{"n": round_ % 2}])
        seen += await rest_of(stream)

    assert sorted(seen) == list(range(ROWS))


async def test_a_loader_that_is_not_started_again_ends_its_block(parquet_files):
    source = data.parquet(parquet_files, columns=["i"])
    with pytest.raises(MeshErrorGroup) as found:
        async with (
            this_host().spawn_procs({"dp": 1}, preload=PRELOAD) as procs,
            this_host().spawn_procs({"n": 1}, preload=("torch",)) as loaders,
            data.open_stream(source, procs, batch=10, loaders=loaders) as stream,
        ):
            await anext(stream)
            await loaders.kill([{"n": 0}])
            await rest_of(stream)
    assert found.value.subgroup(ProcDied) is not None


@pytest.mark.daily
@pytest.mark.parametrize("read_by", ["this process", "loaders"])
async def test_what_cannot_be_read_is_raised_by_the_step_and_the_stream_goes_on_elsewhere(read_by):
    table = pa.table({"i": pa.chunked_array([[0, 1], [2, None], [4, 5]])})
    async with (
        this_host().spawn_procs({"dp": 1}, preload=PRELOAD) as procs,
        this_host().spawn_procs({"n": 1}, preload=("torch",)) as others,
    ):
        loaders = others if read_by == "loaders" else None
        async with data.open_stream(data.table(table), procs, batch=2, loaders=loaders) as stream:
            assert await numbers(await anext(stream)) == [0, 1]
            for _ in range(2):
                with pytest.raises((data.DataError, MeshErrorGroup)) as found:
                    await anext(stream)
                assert "no missing values" in str(next(iter(trimesh.leaves(found.value))))
            state = stream.state_dict()
            assert state["row"] == 2
            stream.load_state_dict({**state, "row": 4})
            assert await rest_of(stream) == [4, 5]


async def test_no_more_is_made_ready_than_was_asked_for(parquet_files, monkeypatch):
    source = data.parquet(parquet_files, columns=["i"])
    asked: list[int] = []
    async with (
        this_host().spawn_procs({"dp": 1}, preload=PRELOAD) as procs,
        data.open_stream(source, procs, batch=10, prefetch=3) as stream,
    ):
        feed = stream._feed
        batch_of = feed.batch
        third = trio.Event()

        async def counted(team: Any, along: Any, position: Any, rows: int) -> Any:
            asked.append(position.row)
            if position.row == 30:
                third.set()
            return await batch_of(team, along, position, rows)

        monkeypatch.setattr(feed, "batch", counted)
        assert await numbers(await anext(stream)) == list(range(10))
        await third.wait()
        for _ in range(3):
            await trimesh.fetch(trimesh.replicate(torch.zeros(1), procs))  # whatever could be asked for would be by now
        assert asked == [0, 10, 20, 30]  # one was given, three wait


async def test_a_query_is_read_by_one_process_and_its_last_batch_may_be_left_out(parquet_files):
    duckdb = pytest.importorskip("duckdb", reason="comes with the extra `test`")
    source = data.query(lambda: duckdb.connect().sql(f"select i from '{parquet_files}' order by i"))
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        async with data.open_stream(source, procs, batch=64, along="dp", drop_last=True) as stream:
            assert stream.rows is None
            assert await rest_of(stream) == list(range(256))
        with pytest.raises(MeshErrorGroup) as found:
            async with data.open_stream(source, procs, batch=64, loaders=procs):
                pass
        assert "got 2 loaders" in str([*trimesh.leaves(found.value)])


async def test_a_block_that_is_left_early_keeps_nothing(parquet_files):
    source = data.parquet(parquet_files, columns=["i", "x"])
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        for loaders in (None, procs):
            async with data.open_stream(source, procs, batch=20, along="dp", prefetch=4, loaders=loaders) as stream:
                await anext(stream)
            with pytest.raises(trio.BrokenResourceError):
                await anext(stream)
            with trio.move_on_after(0.001):
                async with data.open_stream(source, procs, batch=20, loaders=loaders) as stream:
                    await rest_of(stream)
        with procs.activate():
            await trimesh.fetch(torch.zeros(1))  # the ranks have done all that came before
        gc.collect()
        assert moves_of(current_proc()).lent_bytes == 0


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"mixed_rows": 0}, {"prefetch": 0}, {"epochs": 0}])
async def test_numbers_out_of_bounds_are_refused(parquet_files, wrong):
    [(name, _)] = wrong.items()
    async with this_host().spawn_procs({"dp": 1}, preload=PRELOAD) as procs:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            data.open_stream(data.parquet(parquet_files), procs, **{"batch": 1, **wrong})


class Gate(Actor):
    """Holds loads of the loader beside it in their thread, and counts the pieces that it keeps."""

    @endpoint
    def hold(self, entered: Path, gate: Path) -> None:
        fill = streams._fill

        def held(*args: Any) -> None:
            entered.write_text("")
            gate.read_text()
            fill(*args)

        streams._fill = held

    @endpoint
    def kept(self) -> int:
        [loader] = [one for one in gc.get_objects() if type(one) is streams.Loader]
        return len(loader.kept)


async def test_rows_of_a_cancelled_load_are_released(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    os.mkfifo(entered)
    os.mkfifo(gate)
    async with this_host().spawn_procs({"n": 1}, preload=("torch",)) as loaders:
        source, plan = data.table({"i": list(range(40))}), ReadingPlan(None, 0, {})
        async with streams.open_feed(source, plan, loaders) as feed:
            gates = await loaders.spawn("gates", Gate)
            await gates.hold.call_one(entered, gate)
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()

                async def load() -> None:
                    with scope:
                        await feed.batch(None, None, Position(0, 0), 10)

                nursery.start_soon(load)
                await trio.to_thread.run_sync(entered.read_text)
                scope.cancel()
                await trio.to_thread.run_sync(gate.write_text, "")
            with trio.fail_after(HANG_SECONDS):
                while await gates.kept.call_one():  # noqa: ASYNC110 - the release is a broadcast
                    await trio.sleep(0.01)
