"""Batches of rows on each kind of device."""

from __future__ import annotations

import pytest
from tests.data.conftest import ROWS
from tests.devices import on_each_device

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")
pytest.importorskip("pyarrow", reason="comes with the extra `data`")

from trimesh import data  # noqa: E402 - needs torch

pytestmark = [pytest.mark.torch, pytest.mark.real]

PRELOAD = ("torch", "torch.distributed.tensor")


@on_each_device
@pytest.mark.parametrize("read_by", ["this process", "loaders"])
async def test_rows_arrive_on_the_device_of_each_rank(parquet_files: str, device: str, read_by: str) -> None:
    source = data.parquet(parquet_files, columns=["i", "x", "tokens"])
    seen: list[int] = []
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs,
        this_host().spawn_procs({"n": 1}, preload=("torch",)) as others,
    ):
        loaders = others if read_by == "loaders" else None
        async with data.open_stream(
            source,
            procs,
            batch=64,
            along="dp",
            seed=1,
            mixed_rows=100,
            pad={"tokens": data.Pad(3, -1)},
            loaders=loaders,
        ) as stream:
            async for batch in stream:
                assert {tensor.device.type for tensor in batch.values()} == {device}
                doubled = batch["x"] * 2  # computed there
                rows = (await trimesh.fetch(batch["i"])).tolist()
                assert (await trimesh.fetch(doubled)).tolist() == [[2.0 * row] * 3 for row in rows]
                expected = [(list(range(row % 5)) + [-1] * 3)[:3] for row in rows]
                assert (await trimesh.fetch(batch["tokens"])).tolist() == expected
                seen += rows
    assert sorted(seen) == list(range(ROWS))
