"""Meshes without processes: what they count is what real ones do."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

import trimesh
from trimesh import Actor, MeshStopped, ProcMesh, ShapeError, limits, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, Stage  # noqa: E402 - after the skip
from tests.tensor.memory_sampler import begin, end  # noqa: E402

from trimesh.tensor import (  # noqa: E402
    Collectives,
    Device,
    ParallelPlan,
    Pipeline,
    RankLink,
    SimulationReport,
    measure_device,
    simulate,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
COLUMNS, ROWS = ["*.q", "*.k", "*.v", "*.gate", "*.up", "embed", "head"], ["*.out", "*.down"]
PEAK_SHARE = 0.1
"""By which the peak of memory may differ: what the allocator rounds up, what objects and torch's kernels take."""
GLOO_BYTES = 1 << 17
"""By how much more it may be: gloo gathers into a copy, 128 KiB of the largest weight here, and a thread of gloo's
drops that when it comes to it, which may be after the next operators."""

SLOW = Device(
    name="slow",
    flops={"float32": 1e9},
    memory_bytes_per_second=1e9,
    memory_bytes=1_000_000,
    launch_seconds=0.0,
    operator_seconds=0.0,
    issue_seconds=0.0,
    link=RankLink(0.0, 1e6),
    network=RankLink(0.0, 1e5),
    per_host=4,
    is_asynchronous=False,
)


def linear_step(mesh: ProcMesh, plan: ParallelPlan, cuts: Any) -> Any:
    """Run a linear layer forth and back."""
    model = trimesh.module_to_mesh(nn.Linear(512, 1024), mesh, plan)
    model(trimesh.distribute(torch.randn(256, 512), mesh, cuts)).square().mean().backward()
    return model


def gpt_steps(mesh: ProcMesh, plan: ParallelPlan, cuts: Any) -> Any:
    """Train a GPT for two steps of AdamW."""
    model = trimesh.module_to_mesh(GPT(layers=1), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trimesh.optimizer_to_mesh(optimizer)
    text = trimesh.distribute(torch.randint(0, VOCABULARY, (512, LENGTH)), mesh, cuts)
    for _ in range(2):
        nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def simulated(program: Any, sizes: dict[str, int], *args: Any, **options: Any) -> SimulationReport:
    """Return what a program would take; what it returns lives until that is known."""
    with simulate(sizes, **options) as mesh:
        kept = program(mesh, *args)
        report = mesh.report()
        del kept
    return report


async def check(procs: ProcMesh, program: Any, plan: ParallelPlan, cuts: Any) -> None:
    """Run a program really and without processes: the same collectives and bytes, and nearly the same memory."""
    sizes = dict(procs.extent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TENSOR_COMMANDS_AHEAD", 0)  # commands that wait for a busy rank are memory, too
        kept = program(procs, plan, cuts)  # what torch makes for its first run is no part of it
        del kept
        # Nor is what a process takes once, at any time: of two runs it is in one.
        peak = await peak_of(procs, program, plan, cuts)
        before = {(one.label, one.name): (one.count, one.sent) for one in await trimesh.tensor.traffic(procs)}
        peak = min(peak, await peak_of(procs, program, plan, cuts))
    real = [
        Collectives(one.label, one.name, one.count - count, one.sent - sent)
        for one in await trimesh.tensor.traffic(procs)
        for count, sent in [before.get((one.label, one.name), (0, 0))]
        if one.count > count
    ]
    report = simulated(program, sizes, plan, cuts)

    assert sorted(map(str, report.traffic)) == sorted(map(str, real)), plan
    more, share = peak - report.peak_bytes, PEAK_SHARE * peak
    assert -share < more < share + GLOO_BYTES, (plan, report.peak_bytes, peak)


async def peak_of(procs: ProcMesh, program: Any, plan: ParallelPlan, cuts: Any) -> int:
    """Run a program; return how much more than before it the first rank has held at most."""
    with procs.activate():
        await trimesh.call_on_shard_and_fetch(begin)
    kept = program(procs, plan, cuts)
    with procs.activate():
        peak: int = await trimesh.call_on_shard_and_fetch(end, shard=dict.fromkeys(procs.extent, 0))
        await trimesh.call_on_shard_and_fetch(_forget)
    del kept
    return peak


def _forget() -> None:
    """End what other ranks than the first still look at."""
    from tests.tensor.memory_sampler import _samplers

    if _samplers:
        end()


@pytest.mark.real
async def test_a_simulation_of_two_ranks_sends_and_holds_what_two_ranks_do() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        cut = ["gpus", None]
        await check(procs, linear_step, ParallelPlan.data("gpus"), cut)
        await check(procs, gpt_steps, ParallelPlan.fully_sharded("gpus"), cut)
        tensor = ParallelPlan.tensor("gpus", columns=COLUMNS, rows=ROWS, sequence=True)
        await check(procs, gpt_steps, tensor, None)


@pytest.mark.real
@pytest.mark.stress
async def test_a_simulation_of_other_plans_and_more_ranks_sends_and_holds_what_they_do() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        cut = ["gpus", None]
        await check(procs, linear_step, ParallelPlan.fully_sharded("gpus"), cut)
        await check(procs, gpt_steps, ParallelPlan.data("gpus"), cut)
        await check(procs, gpt_steps, ParallelPlan.optimizer_sharded("gpus"), cut)
        await check(procs, gpt_steps, ParallelPlan.optimizer_sharded("gpus", gradients=True), cut)
        await check(procs, gpt_steps, ParallelPlan.context("gpus"), [None, "gpus"])
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as procs:
        tensor = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS)
        await check(procs, gpt_steps, tensor | ParallelPlan.data("dp"), ["dp", None])
        await check(procs, gpt_steps, tensor | ParallelPlan.fully_sharded("dp"), ["dp", None])
        await check(procs, gpt_steps, ParallelPlan.context("tp") | ParallelPlan.data("dp"), ["dp", "tp"])


def test_hundreds_of_ranks_take_the_work_of_one() -> None:
    plan = ParallelPlan.fully_sharded("gpus")
    few, many = (simulated(linear_step, {"gpus": count}, plan, ["gpus", None]) for count in (2, 256))

    weights = (512 + 1) * 1024 * 4
    assert many.traffic.sent("gpus") == 2 * weights * 255 // 256 == 2 * (weights - weights // 256)
    assert few.traffic.sent("gpus") == 2 * weights * 1 // 2
    assert many.operators == few.operators
    assert many.peak_bytes < few.peak_bytes
    assert many.ranks == 1


def test_time_is_that_of_the_numbers_of_the_device() -> None:
    def add(mesh: ProcMesh) -> Any:
        with mesh.activate():
            one = torch.ones(250_000)  # a million bytes, and a millisecond
        return one + one  # reads it, and writes as much

    report = simulated(add, {"gpus": 2}, device=SLOW)
    assert report.seconds == pytest.approx(0.003)
    assert report.peak_bytes == 2_000_000
    assert not report.fits
    assert "MORE than the" in str(report)
    [made, added] = sorted(report.lines, key=lambda one: one.seconds)
    assert (made.seconds, added.seconds) == (pytest.approx(0.001), pytest.approx(0.002))
    assert added.line.endswith("test_time_is_that_of_the_numbers_of_the_device.<locals>.add")


def test_collectives_go_by_the_link_of_their_dimension() -> None:
    def add_up(mesh: ProcMesh, label: str) -> Any:
        with mesh.activate():
            one = torch.empty(250_000)
        mesh.begin_anew()  # type: ignore[attr-defined]
        return one.reduce(label)

    sizes = {"hosts": 2, "gpus": 4}  # a host of that device has four
    for label, ranks, options, rate in (
        ("gpus", 4, {}, 1e6),
        ("hosts", 2, {}, 1e5),
        ("hosts", 2, {"links": {"hosts": RankLink(1.0, 1e7)}}, 1e7),
    ):
        report = simulated(add_up, sizes, label, device=SLOW, **options)
        sent = 2 * 1_000_000 * (ranks - 1) // ranks
        assert report.traffic.sent(label) == sent
        waited = 2.0 if options else 0.0  # of one second for each of two steps
        copies = report.seconds - sent / rate - waited
        assert 0 < copies < 0.006, label
    with pytest.raises(ShapeError, match="a link must be along a dimension of"):
        simulated(add_up, sizes, "gpus", links={"nodes": RankLink(0.0, 1.0)})


def test_values_are_refused_or_given_as_the_program_says() -> None:
    def look(mesh: ProcMesh) -> list[Any]:
        there = trimesh.distribute(torch.zeros(4, 2), mesh, ["gpus", None])
        return [there.sum().item(), there.tolist()]

    with pytest.raises(RuntimeError, match=r"a simulation has no values, .*values=0\.5"), simulate({"gpus": 2}) as mesh:
        look(mesh)
    with pytest.raises(RuntimeError, match="a simulation has no values"), simulate({"gpus": 2}, values=1.0) as mesh:
        torch.nonzero(trimesh.distribute(torch.ones(4), mesh, ["gpus"]))
    with simulate({"gpus": 2}, values=0.25) as mesh:
        assert look(mesh) == [0.25, [[0.25, 0.25]] * 4]
    with simulate({"gpus": 2}, values=lambda one: torch.full(one.size(), 3.0)) as mesh:
        assert look(mesh)[0] == 3.0
        whole = trimesh.distribute(torch.zeros(4).long(), mesh, ["gpus"])
        with pytest.raises(ValueError, match="of its size and dtype, got"):
            whole.tolist()


async def test_what_is_awaited_of_real_ranks_is_answered_where_it_is_known() -> None:
    with simulate({"gpus": 2}, values=1.0) as mesh:
        there = trimesh.distribute(torch.zeros(4, 2), mesh, ["gpus", None])
        assert (await trimesh.placements(there.sum(0))).partial == {"gpus": "sum"}
        assert await trimesh.placements(there) == ["gpus", None]
        assert (await trimesh.fetch(there)).tolist() == [[1.0, 1.0]] * 4
        assert await trimesh.tensor.fallbacks(mesh) == {}
        assert (await trimesh.tensor.traffic(mesh)).sent() == mesh.report().traffic.sent()


def test_a_recorded_step_counts_as_the_step_does() -> None:
    with simulate({"dp": 4}) as mesh:
        model = trimesh.module_to_mesh(nn.Linear(8, 8), mesh, ParallelPlan.fully_sharded("dp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = trimesh.distribute(torch.randn(16, 8), mesh, ["dp", None])

        @trimesh.compile
        def step(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        seen = []
        for _ in range(5):
            mesh.begin_anew()
            step(x)
            report = mesh.report()
            seen.append((report.operators, report.traffic.sent(), report.peak_bytes))
        assert step.is_recorded
        assert seen[-1] == seen[-2] == seen[1]
        assert mesh.report().commands == 1


def test_stages_of_a_pipeline_compute_at_the_same_time() -> None:
    def loss_of(logits: Any, goal: Any) -> Any:
        return nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())

    def step(mesh: ProcMesh, microbatches: int) -> Any:
        gpt = GPT(layers=2)
        stages = [Stage(gpt, index, 2) for index in range(2)]
        pipeline = Pipeline(stages, mesh, "pp", microbatches=microbatches, schedule="gpipe")
        text = torch.randint(0, VOCABULARY, (1024, LENGTH))
        mesh.begin_anew()  # type: ignore[attr-defined]
        pipeline.step(text, text, loss_of)
        return pipeline

    near = attrs.evolve(SLOW, link=RankLink(0.0, 1e12))
    one, four = (simulated(step, {"pp": 2}, count, device=near) for count in (1, 4))
    assert four.ranks == 2
    assert one.moved_bytes == four.moved_bytes > 0
    assert four.seconds < 0.85 * one.seconds  # the second stage need not wait for all of the batch


def test_a_module_may_be_larger_than_this_machine() -> None:
    with torch.device("meta"):
        model = nn.Linear(1_000_000, 1_000_000, bias=False)
    with simulate({"gpus": 512}, device="h100") as mesh:
        model = trimesh.module_to_mesh(model, mesh, ParallelPlan({"weight": ["gpus", None]}))
        assert mesh.report().held_bytes == 4 * 1_000_000 * -(-1_000_000 // 512)
        assert mesh.report().fits
        del model


def test_a_trace_names_operators_by_the_line_that_issued_them(tmp_path: Path) -> None:
    with simulate({"gpus": 2}) as mesh:
        kept = linear_step(mesh, ParallelPlan.fully_sharded("gpus"), ["gpus", None])
        mesh.write_trace(tmp_path / "trace.json")
        del kept
    found = json.loads((tmp_path / "trace.json").read_text())
    events = [one for one in found["traceEvents"] if one["ph"] == "X"]
    assert found["otherData"] == {"missing": 0}
    assert {one["cat"] for one in events} == {"operator", "collective"}
    products = [one for one in events if one["name"].split()[-1] in ("addmm", "mm")]
    assert products
    assert all(one["args"]["line"].endswith(" in linear_step") for one in products)
    ends = [(one["ts"], one["ts"] + one["dur"]) for one in events]
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(ends))


def test_what_needs_processes_is_refused_and_nothing_is_left() -> None:
    threads = set(threading.enumerate())
    with simulate({"gpus": 2}) as mesh:
        there = trimesh.distribute(torch.zeros(4), mesh, ["gpus"])
        with pytest.raises(RuntimeError, match="is simulated and has no processes: actors are spawned in processes"):
            mesh.spawn("one", Actor)
        assert mesh.slice(gpus=0).size() == 1
        assert repr(mesh) == "<processes simulated{'gpus': 2}>"
    assert threads.issuperset(threading.enumerate())  # some that wait for work may have ended
    assert not torch.distributed.is_initialized()
    with pytest.raises(MeshStopped, match="the block of the simulation has been left"):
        there + 1
    with pytest.raises(MeshStopped, match="the block of the simulation has been left"):
        mesh.report()
    with (
        pytest.raises(RuntimeError, match=r"function under @trimesh\.remote needs processes"),
        simulate({"a": 2}) as mesh,
    ):
        with mesh.activate():
            trimesh.remote(torch.zeros)(3)
        mesh.report()


@pytest.mark.real
@pytest.mark.stress
async def test_time_is_within_a_factor_of_that_of_real_steps() -> None:
    """By numbers that were measured before it; docs/tensors.md has the comparison."""
    plan, cut = ParallelPlan.fully_sharded("gpus"), ["gpus", None]

    def step_of(mesh: ProcMesh) -> Any:
        model = trimesh.module_to_mesh(nn.Linear(512, 1024), mesh, plan)
        x = trimesh.distribute(torch.randn(1024, 512), mesh, cut)
        return lambda: model(x).square().mean().backward()

    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD, env={"OMP_NUM_THREADS": "1"}) as procs:
        device = await measure_device(procs)
        step, took = step_of(procs), []
        for _ in range(7):
            begun = time.perf_counter()
            step()
            await trimesh.tensor.traffic(procs)
            took.append(time.perf_counter() - begun)
    with simulate({"gpus": 2}, device=device) as mesh:
        step = step_of(mesh)
        mesh.begin_anew()
        step()
        expected = mesh.report().seconds
    assert 1 / 3 < expected / sorted(took)[3] < 3


async def test_links_are_measured_between_two_ranks_at_least() -> None:
    wanted = "the first dimension must have at least 2 ranks to measure links, got"
    with simulate({"gpus": 1}) as mesh, pytest.raises(ShapeError, match=wanted):
        await measure_device(mesh)


def test_devices_have_names_or_numbers() -> None:
    with pytest.raises(ValueError, match=r"a device must be one of \['cpu', 'h100'\], got 'tpu'"):
        simulated(lambda _: None, {"gpus": 2}, device="tpu")
    with pytest.raises(TypeError, match="a device must be a Device or the name of one, got 1"):
        simulated(lambda _: None, {"gpus": 2}, device=1)
    with pytest.raises(ValueError, match="bytes_per_second must be a positive number, got 0"):
        RankLink(0.0, 0)
    with pytest.raises(ValueError, match="latency_seconds must be 0 or more, got -1"):
        RankLink(-1, 1.0)
    assert SLOW.compute_seconds("bfloat16", 2e9, 1.0) == 2.0
