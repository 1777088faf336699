"""Metrics that programs log, with coordinates, and how they reach a reader (Q13, Q14)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend
from tests.conformance.test_observe import look

import trimesh
from trimesh import Actor, endpoint, limits, telemetry
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.sampling import SampleBatch, sampling_of
from trimesh._wire.observed import SampleRow


class Trainer(Actor):
    """Logs in all the ways of an actor."""

    @endpoint
    async def step(self, number: int) -> None:
        trimesh.log({"loss": 1 / (number + 1), "rank": trimesh.current_rank()}, step=number)
        telemetry.counter("tokens").add(512)
        telemetry.gauge("queue").set(3)
        telemetry.histogram("delay", [0.1, 1]).record(0.5)

    @endpoint(thread=True)
    def step_in_thread(self) -> None:
        trimesh.log({"threaded": True})

    @endpoint
    async def open_files(self, path: str) -> str:
        try:
            async with trimesh.log_to(path):
                return "opened"
        except RuntimeError as error:
            return str(error)

    @endpoint
    def flood(self, count: int) -> None:
        for number in range(count):
            trimesh.log({"flood": number}, step=number)

    @endpoint
    def invent(self, count: int) -> None:
        for number in range(count):
            trimesh.log({f"name {number}": 0})


def series(seen: Any) -> dict[tuple[str, str], Any]:
    return {(row.metric, row.name): row for row in seen.metrics}


async def test_metrics_have_the_coordinates_of_the_code(backend: Backend):
    """Q13: in the controller and in actors, in their threads, without and with pickle."""
    trimesh.log({"outside": 0.5})
    async with backend.procs() as procs:
        trainers = await procs.spawn("trainers", Trainer)
        for number in range(3):
            await trainers.step.call(number)
        if not backend.is_sim:  # its clock would jump while a thread works
            await trainers.step_in_thread.call()
        found = series(await look())
    assert found["outside", "controller"].value == 0.5
    for rank in range(2):
        name = f"trainers[gpus={rank}]"
        row = found["loss", name]
        assert (row.kind, row.step, row.mesh, row.point) == ("value", 2, "trainers", {"gpus": rank})
        assert row.value == pytest.approx(1 / 3)
        assert found["rank", name].value == rank
        assert (found["tokens", name].kind, found["tokens", name].value) == ("counter", 3 * 512)
        assert (found["queue", name].kind, found["queue", name].value) == ("gauge", 3)
        spread = found["delay", name]
        assert (spread.kind, spread.value, spread.bounds, spread.counts) == ("histogram", 1.5, (0.1, 1.0), (0, 3, 0))
        assert backend.is_sim or found["threaded", name].value == 1


async def test_samples_that_no_reader_takes_are_dropped_and_counted(backend: Backend):
    """Q13: the newest value stays, and nothing waits."""
    async with backend.procs() as procs:
        trainers = await procs.spawn("trainers", Trainer)
        before = (await look()).samples_dropped
        await trainers.flood.call(limits.METRIC_SAMPLES + 10)
        seen = await look()
    assert seen.samples_dropped - before == 2 * 10
    assert {row.value for row in seen.metrics if row.metric == "flood"} == {limits.METRIC_SAMPLES + 9}


async def test_names_are_bounded(backend: Backend, caplog: pytest.LogCaptureFixture):
    """Q13: a name with a changing part fills no memory."""
    async with backend.procs() as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.slice(gpus=0).invent.call_one(limits.METRIC_SERIES + 10)
        seen = await look()
    assert 0 < len([row for row in seen.metrics if row.metric.startswith("name ")]) <= limits.METRIC_SERIES
    if backend.is_sim:
        assert "new names are dropped" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"loss": "0.5"}, TypeError, r"log takes numbers, got str for 'loss': convert it with float\(\)"),
        ({"loss": {"a": 1}}, TypeError, 'write one level, "loss/part"'),
        ({1: 0.5}, TypeError, "names of metrics must be texts, got 1"),
        ([0.5], TypeError, "log takes a mapping from names to numbers, got list"),
        ({"": 0.5}, ValueError, "1 to 128 printable characters"),
        ({"trimesh.calls": 0.5}, ValueError, "are those of the runtime"),
        ({"a": None}, TypeError, "got NoneType for 'a'"),
        ({str(one): 0 for one in range(300)}, ValueError, "at most 256 values in one call, got 300"),
    ],
)
def test_what_is_no_number_is_refused(wrong: Any, error: type[Exception], text: str):
    """Q13: before anything is kept."""
    with pytest.raises(error, match=text):
        trimesh.log(wrong)


def test_wrong_steps_and_amounts_are_refused():
    """Q13: so are second kinds of one name."""
    with pytest.raises(TypeError, match=r"step must be a whole number or None, got 0\.5"):
        trimesh.log({"a": 1}, step=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a counter only grows, got -1"):
        telemetry.counter("grows").add(-1)
    with pytest.raises(ValueError, match="'grows' is a counter here, so it cannot be a gauge, too"):
        telemetry.gauge("grows")
    with pytest.raises(ValueError, match="must rise"):
        telemetry.histogram("spread", [2, 1])


async def test_instruments_travel(backend: Backend):
    """Q13: as what a class or function refers to."""
    del backend
    await trio.lowlevel.checkpoint()
    assert pickle.loads(pickle.dumps(telemetry.counter("moved"))) is telemetry.counter("moved")


# ---- collection ------------------------------------------------------------------------------------------------------


class Collected:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.samples: list[SampleRow] = []

    def take(self, batch: SampleBatch) -> None:
        self.samples += batch.samples

    def steps(self, metric: str, name: str) -> list[int | None]:
        return [one.step for one in self.samples if one.name == name and metric in one.values]


class Owner(Actor):
    """Owns processes of its own."""

    @endpoint
    async def train_below(self) -> None:
        async with trimesh.this_host().spawn_procs({"ranks": 2}, name="inner") as procs:
            trainers = await procs.spawn("below", Trainer)
            await trainers.step.call(0)


async def test_samples_of_all_processes_arrive_once_and_in_order(backend: Backend):
    """Q14: those of processes that have been stopped, and of processes that others own, too."""
    sink = Collected()
    async with backend.procs() as procs:
        sampling = sampling_of(current_proc())
        sampling.add(sink)
        trainers = await procs.spawn("trainers", Trainer)
        for number in range(4):
            await trainers.step.call(number)
            await sampling.collect()
        owners = await procs.spawn("owners", Owner)
        await owners.train_below.call()
        await sampling.collect()
        async with backend.procs(name="short") as short:
            await (await short.spawn("short", Trainer)).step.call(7)
        await sampling.collect()
        sampling.remove(sink)
    for rank in range(2):
        assert sink.steps("loss", f"trainers[gpus={rank}]") == [0, 1, 2, 3]
        assert sink.steps("loss", f"below[ranks={rank}]") == [0, 0]
        assert sink.steps("loss", f"short[gpus={rank}]") == [7]


async def test_nothing_is_collected_without_a_reader(backend: Backend):
    """Q14: samples stay in their process until there is one."""
    async with backend.procs() as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)
        number, found = sampling_of(current_proc()).read(0)
        assert (number, found) == (0, [])
        while not number:
            await trio.sleep(0.01)
            number, found = sampling_of(current_proc()).read(0)
        assert {one.name for one in found if one.step == 1} == {"trainers[gpus=0]", "trainers[gpus=1]"}
        assert sampling_of(current_proc()).read(number)[1] == []


async def test_actor_opens_no_files_of_the_run(backend: Backend, tmp_path: Path):
    """Q16: wrong formats are refused with those that there are."""
    async with backend.procs() as procs:
        trainers = await procs.spawn("trainers", Trainer)
        said = await trainers.slice(gpus=0).open_files.call_one(str(tmp_path))
    assert said == "log_to writes the metrics of a whole run, so it is opened in the controller: an actor logs"
    with pytest.raises(ValueError, match="log_to writes 'jsonl' and 'tensorboard', got 'csv'"):
        trimesh.log_to(tmp_path, "csv")
