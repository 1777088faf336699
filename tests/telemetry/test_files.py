"""Metrics in files: JSON lines, and event files that TensorBoard reads (Q16)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend

import trimesh
from trimesh import Actor, aio, blocking, endpoint, limits, telemetry, this_host


class Trainer(Actor):
    @endpoint
    def step(self, number: int) -> None:
        trimesh.log({"loss": 1 / (number + 1), "bad": float("nan")}, step=number)
        telemetry.counter("tokens").add(512)
        telemetry.histogram("wait", [1, 2]).record(0.5)


class Engine(aio.Actor):
    @endpoint
    async def step(self) -> None:
        async def log(name: str) -> None:
            trimesh.log({name: 1.0}, step=3)

        await asyncio.gather(log("first"), log("second"))
        await asyncio.to_thread(trimesh.log, {"third": 1.0}, step=3)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(folder: Path, incarnations: int = 1) -> None:
    found = lines(folder)
    for rank in range(2):
        of_rank = [one for one in found if one["name"] == f"trainers[gpus={rank}]"]
        losses = [one for one in of_rank if "loss" in one["values"]]
        assert [one.get("step") for one in losses] == [0, 1, 2] * incarnations
        assert losses[1]["values"] == {"loss": 0.5, "bad": None}
        assert losses[1]["point"] == {"gpus": rank}


async def train(mesh: Any) -> None:
    trainers = await mesh.spawn("trainers", Trainer)
    for number in range(3):
        await trainers.step.call(number)


def test_simulated_run_writes_the_same_lines(tmp_path: Path):
    """Q16: by its virtual clock."""

    async def main(folder: Path) -> None:
        backend = SimBackend()
        async with backend.open(), trimesh.log_to(folder), backend.procs() as procs:
            await train(procs)
            await trio.sleep(2 * limits.SAMPLING_SECONDS)

    for name in ("one", "two"):
        SimBackend().run(lambda name=name: main(tmp_path / name))  # type: ignore[misc]
        check(tmp_path / name)
    first, second = (lines(tmp_path / name) for name in ("one", "two"))
    assert first == second
    totals = [one["values"]["tokens"] for one in first if one.get("kind") == "counter"]
    assert set(totals) == {3 * 512}


@pytest.mark.real
@pytest.mark.daily
async def test_last_values_of_a_short_run_are_written(tmp_path: Path):
    """Q16: the block may be around the processes, or within; files are appended to."""
    async with trimesh.log_to(tmp_path), this_host().spawn_procs({"gpus": 2}) as procs:
        await train(procs)
    check(tmp_path)
    async with this_host().spawn_procs({"gpus": 2}) as procs, trimesh.log_to(str(tmp_path)):
        await train(procs)
    check(tmp_path, 2)
    [one, _] = [row for row in lines(tmp_path) if "wait" in row["values"] and row["name"] == "trainers[gpus=0]"][
        -1:
    ] * 2
    assert (one["kind"], one["bounds"], one["counts"]) == ("histogram", [1.0, 2.0], [3, 0, 0])


@pytest.mark.real
def test_files_from_asyncio_and_plain_scripts(tmp_path: Path):
    """Q16: with the same blocks."""

    async def main() -> None:
        async with trimesh.log_to(tmp_path / "aio"), aio.spawn_procs({"gpus": 2}) as procs:
            await train(procs)
            await (await procs.spawn("engines", Engine)).step.call()

    asyncio.run(main())
    check(tmp_path / "aio")
    engines = [(one["name"], *one["values"]) for one in lines(tmp_path / "aio") if one["mesh"] == "engines"]
    names = [f"engines[gpus={rank}]" for rank in range(2)]
    assert sorted(engines) == [(name, which) for name in names for which in ("first", "second", "third")]
    with blocking.log_to(tmp_path / "plain"), blocking.spawn_procs({"gpus": 2}) as procs:
        trainers = procs.spawn("trainers", Trainer)
        for number in range(3):
            trainers.step.call(number)
    check(tmp_path / "plain")


@pytest.mark.real
async def test_missing_tensorboard_and_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Q16: when the block is entered, and nothing is left of it."""
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.RaisesGroup(ModuleNotFoundError, allow_unwrapped=True) as caught:
        async with trimesh.log_to(tmp_path, "tensorboard"):
            pass
    assert "pip install tensorboard" in str([*trimesh.leaves(caught.value)])
    (tmp_path / "file").touch()
    with pytest.RaisesGroup(OSError, allow_unwrapped=True):
        async with trimesh.log_to(tmp_path / "file" / "x"):
            pass
