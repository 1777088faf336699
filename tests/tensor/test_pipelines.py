"""Pipelines: the order of a schedule, and a GPT in stages that trains as plain torch trains it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.rows import rows

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, Stage, optimizer_of  # noqa: E402 - after the skip

from trimesh.tensor import Device, ParallelPlan, Pipeline, RankLink, profile, simulate  # noqa: E402
from trimesh.tensor.parallel.schedule import (  # noqa: E402
    Schedule,
    Turn,
    idle_share,
    issue_order,
    kept_most,
    needs_one_place,
    turns_of_ranks,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
STEPS = 2


@rows("schedule", ["1f1b", "gpipe"])
@rows("stages", [1, 2, 3, 4])
@rows("batches", [1, 2, 3, 8])
def test_every_micro_batch_goes_forth_and_back_once(schedule: Schedule, stages: int, batches: int) -> None:
    order = issue_order(schedule, stages, batches)

    assert len(order) == len(set(order)) == 2 * stages * batches
    place = {turn: index for index, turn in enumerate(order)}
    for turn in order:
        step = 1 if turn.is_forward else -1
        before = [one for one in order if one.batch == turn.batch and one.is_forward == turn.is_forward]
        assert all(place[one] < place[turn] for one in before if (one.stage - turn.stage) * step < 0)
        if not turn.is_forward:
            assert all(place[one] < place[turn] for one in order if one.is_forward and one.batch == turn.batch)
    for stage in range(stages):
        kept = kept_most([one for one in order if one.stage == stage])
        assert kept == (batches if schedule == "gpipe" else min(batches, stages - stage))


@rows(("ranks", "each"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2), (3, 4)])
@rows("batches", [1, 2, 3, 8, 12])
def test_interleaved_stages_go_forth_and_back_in_the_order_of_their_ranks(ranks: int, each: int, batches: int) -> None:
    stages = ranks * each
    order = issue_order("interleaved", stages, batches, ranks)

    assert len(order) == len(set(order)) == 2 * stages * batches
    place = {turn: index for index, turn in enumerate(order)}
    for turn in order:
        if turn.is_forward and turn.stage:
            assert place[Turn(turn.stage - 1, turn.batch, is_forward=True)] < place[turn]
        if not turn.is_forward and turn.stage < stages - 1:
            assert place[Turn(turn.stage + 1, turn.batch, is_forward=False)] < place[turn]
        if not turn.is_forward:
            assert place[Turn(turn.stage, turn.batch, is_forward=True)] < place[turn]
    for rank in range(ranks):
        own = [one for one in order if one.stage % ranks == rank]
        assert own == list(turns_of_ranks("interleaved", rank, ranks, stages, batches))


def test_interleaved_stages_wait_less() -> None:
    # Of 3 stages with 8 micro-batches: 24 + 3 x 3 units, of which a rank waits for the 9.
    assert idle_share(issue_order("1f1b", 4, 8), 4, 4) == pytest.approx(9 / 33)
    assert idle_share(issue_order("interleaved", 8, 8, 4), 8, 4) == pytest.approx(9 / 57)
    with pytest.raises(ValueError, match="groups of 5, got 7: choose a multiple"):
        issue_order("interleaved", 10, 7, 5)


@pytest.mark.parametrize("batches", [1, 2, 3, 8])
def test_ranks_that_keep_one_copy_for_others_go_on_but_for_interleaved_stages(batches: int) -> None:
    for stages in (1, 2, 3, 4):
        assert needs_one_place(issue_order("1f1b", stages, batches), stages, stages)
        assert needs_one_place(issue_order("gpipe", stages, batches), stages, stages)
    # Each of two ranks sends the second micro-batch before it takes the first one back, which the other keeps.
    assert needs_one_place(issue_order("interleaved", 4, batches, 2), 4, 2) == (batches < 3)


FREE_LINK = RankLink(0.0, 1e15)
COMPUTING = Device(
    name="computing", flops={"float32": 1e9}, memory_bytes_per_second=1e15, memory_bytes=10**9, launch_seconds=0.0,
    operator_seconds=0.0, issue_seconds=0.0, link=FREE_LINK, network=FREE_LINK, per_host=64, is_asynchronous=False,
)  # fmt: skip
"""A device on which products alone take time."""


def square(given: Any, goal: Any) -> Any:
    return (given - goal).square().mean()


def linear_stages(count: int) -> list[Any]:
    return [nn.Linear(64, 64, bias=False) for _ in range(count)]


@pytest.mark.parametrize(("schedule", "places", "stages"), [("1f1b", 4, 4), ("gpipe", 2, 2), ("interleaved", 2, 4)])
def test_ranks_wait_as_long_as_the_schedule_says(schedule: Schedule, places: int, stages: int) -> None:
    told = Pipeline.explain(linear_stages(stages), {"pp": places}, "pp", microbatches=4, schedule=schedule)
    with simulate({"pp": places}, device=COMPUTING) as mesh:
        made = Pipeline(linear_stages(stages), mesh, "pp", microbatches=4, schedule=schedule)
        mesh.begin_anew()
        made.step(torch.zeros(256, 64), torch.zeros(256, 64), square)
        report = mesh.report()
    one = 2 * 64 * 64 * 64 / 1e9
    idle = 1 - 3 * one * 4 * stages / places / report.seconds
    assert told.idle - 0.05 < idle < told.idle + 0.01  # the first stage has no gradient of its input to find


def test_what_an_interrupted_step_has_sent_is_taken() -> None:
    def failing(given: Any, goal: Any) -> Any:
        if len(losses) == 2:
            raise ValueError("no third loss")
        losses.append(square(given, goal))
        return losses[-1]

    losses: list[Any] = []
    with simulate({"pp": 2}) as mesh:
        made = Pipeline(linear_stages(2), mesh, "pp", microbatches=4)
        with pytest.raises(ValueError, match="no third loss"):
            made.step(torch.zeros(8, 64), torch.zeros(8, 64), failing)
        mesh.report()  # all that was issued is done
        engine = losses[0]._held.team.engine
        assert engine._sent == {}


def order_in(path: Path, names: dict[str, str], tracks: dict[int, int]) -> dict[int, list[str]]:
    """Return what ranks have computed, sent and received, in order, by a trace."""
    found: dict[int, list[str]] = {place: [] for place in tracks.values()}
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    for event in sorted(events, key=lambda one: one["ts"]):
        name = names.get(event["name"].partition(" ")[2])
        if event["pid"] in tracks and name is not None:
            found[tracks[event["pid"]]].append(name)
    return found


@pytest.mark.real
async def test_ranks_send_before_they_compute_what_is_next_as_in_the_simulation(tmp_path: Path) -> None:
    batch = torch.zeros(16, 64)
    with simulate({"pp": 2}, device=COMPUTING) as mesh:
        made = Pipeline(linear_stages(2), mesh, "pp", microbatches=4)
        mesh.begin_anew()
        made.step(batch, batch, square)
        mesh.report()
        mesh.write_trace(tmp_path / "simulated.json")
    names = {"mm": "compute", "copy for others": "send", "to_mesh": "receive"}
    simulated = order_in(tmp_path / "simulated.json", names, {1: 0, 2: 1})

    async with this_host().spawn_procs({"pp": 2}, preload=PRELOAD) as procs:
        made = Pipeline(linear_stages(2), procs, "pp", microbatches=4)
        async with profile(procs, tmp_path / "real.json"):
            made.step(batch, batch, square)
    names = {"aten::mm": "compute", "trimesh::send_parts": "send", "trimesh::receive_parts": "receive"}
    real = order_in(tmp_path / "real.json", names, {2: 0, 3: 1})

    assert real == simulated
    assert real[0][:5] == ["compute", "send", "compute", "send", "receive"]
    assert real[1][:5] == ["receive", "compute", "compute", "compute", "send"]


def test_a_pipeline_is_explained_by_sizes_alone() -> None:
    stages = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
    found = Pipeline.explain(
        stages, {"pp": 2, "dp": 2}, "pp", microbatches=4, schedule="interleaved",
        plan=ParallelPlan.data("dp"), example=torch.zeros(16, 4),
    )  # fmt: skip
    assert found.crossing == (16 * 8 * 4,) * 3
    assert found.kept == (5, 3)
    assert [one.bytes_whole for one in found.stages] == [160, 288, 288, 72]
    assert found.stages[0].moved["dp"].reduced == 160
    assert "to stage 1: 512 bytes a step, and as many back" in str(found)
    assert "keep 5, 3 forward passes" in str(found)
    without = Pipeline.explain(stages, {"pp": 4}, "pp", microbatches=4)
    assert without.crossing is None
    assert "not counted" in str(without)
    with pytest.raises(ShapeError, match="of 4 stages needs a dimension 'pp' whose size divides that"):
        Pipeline.explain(stages, {"pp": 3}, "pp", microbatches=4, schedule="interleaved")


def cross_entropy(logits: Any, goal: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())


async def check_training_is_that_of_plain_torch(pipeline: Pipeline, twin: Any) -> None:
    optimizers = [optimizer_of(stage) for stage in pipeline.stages]
    other = optimizer_of(twin)
    for _ in range(STEPS):
        for _ in range(2):
            text, goal = torch.randint(0, VOCABULARY, (2, 8, LENGTH))
            loss = pipeline.step(text, goal, cross_entropy)
            expected = cross_entropy(twin(text), goal)
            expected.backward()
            assert abs(loss.item() - expected.item()) < 1e-5
        norm = pipeline.clip_grad_norm_(0.5)
        assert abs(norm.item() - nn.utils.clip_grad_norm_(twin.parameters(), 0.5).item()) < 1e-4
        for one in (*optimizers, other):
            one.step()
            one.zero_grad()
    first, last = pipeline.stages[0], pipeline.stages[-1]
    embed, head, block = await trimesh.fetch([first.embed.weight, last.head.weight, last.blocks[-1].mlp.up.weight])
    assert torch.allclose(embed, twin.embed.weight, atol=1e-5)
    assert torch.equal(embed, head)
    assert torch.allclose(block, twin.blocks[-1].mlp.up.weight, atol=1e-5)


async def check_what_is_refused(procs: ProcMesh, pipeline: Pipeline) -> None:
    with pytest.raises(ShapeError, match=r"a pipeline of 1 stages needs a dimension 'pp' of that size"):
        Pipeline([nn.Linear(2, 2)], procs, "pp", microbatches=1)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], procs, "pp", microbatches=0)
    with pytest.raises(ValueError, match="4 equal micro-batches, got 6 rows and 6 goals"):
        pipeline.step(torch.zeros(6, LENGTH).long(), torch.zeros(6, LENGTH).long(), cross_entropy)


@pytest.mark.real
async def test_a_gpt_in_stages_trains_as_plain_torch_does() -> None:
    async with this_host().spawn_procs({"pp": 2, "dp": 2}, preload=PRELOAD) as procs:
        plans: tuple[tuple[Schedule, ParallelPlan, int], ...] = (
            ("1f1b", ParallelPlan.fully_sharded("dp"), 2),
            ("interleaved", ParallelPlan.data("dp"), 4),
            ("gpipe", ParallelPlan.data("dp"), 2),
        )
        for schedule, plan, count in plans:
            torch.manual_seed(0)
            model = GPT(layers=count)
            twin = copy.deepcopy(model)
            stages = [Stage(model, index, count) for index in range(count)]
            crossing: list[int] = []
            made = Pipeline(stages, procs, "pp", microbatches=4, schedule=schedule, plan=plan, inputs=["dp"])
            text = torch.zeros(8, LENGTH).long()
            told = Pipeline.explain(
                [Stage(twin, index, count) for index in range(count)], procs, "pp",
                microbatches=4, schedule=schedule, plan=plan, example=text,
            )  # fmt: skip
            hooks = [
                one.register_forward_hook(lambda _part, _args, out, seen=crossing: seen.append(out.nbytes))
                for one in made.stages[:-1]
            ]
            made.step(text, text, cross_entropy)
            assert told.crossing == tuple([sum(crossing) // (count - 1)] * (count - 1))
            for hook in hooks:
                hook.remove()
            for stage in made.stages:
                stage.zero_grad()
            await check_training_is_that_of_plain_torch(made, twin)
            assert await trimesh.placements(made.stages[0].blocks[0].mlp.up.weight) == (
                ["dp", None] if schedule == "1f1b" else [None, None]
            )
        await check_what_is_refused(procs, made)
