"""Event files of metrics, read by TensorBoard itself (Q16)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.telemetry.test_files import Trainer

import trimesh
from trimesh import this_host

pytest.importorskip("tensorboard.summary")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
tensor_util = pytest.importorskip("tensorboard.util.tensor_util")


@pytest.mark.real
async def test_tensorboard_reads_its_files(tmp_path: Path):
    """Q16: a run for each member."""
    async with trimesh.log_to(tmp_path, "tensorboard"), this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        for number in range(3):
            await trainers.step.call(number)
    for rank in range(2):
        events = accumulator.EventAccumulator(str(tmp_path / f"trainers[gpus={rank}]"))
        events.Reload()
        assert {"loss", "tokens", "wait/mean"} <= set(events.Tags()["tensors"])
        found = [(one.step, float(tensor_util.make_ndarray(one.tensor_proto))) for one in events.Tensors("loss")]
        assert [step for step, _ in found] == [0, 1, 2]
        assert found[1][1] == 0.5
        assert "bad" not in events.Tags()["tensors"]
