"""Pipelines: the order of a schedule, and a GPT in stages that trains as plain torch trains it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, Stage, optimizer_of  # noqa: E402 - after the skip

from trimesh.tensor import ParallelPlan, Pipeline  # noqa: E402
from trimesh.tensor.parallel.schedule import Schedule, issue_order, kept_most  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
STEPS = 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 3, 8])
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
        plans: tuple[tuple[Schedule, ParallelPlan], ...] = (
            ("1f1b", ParallelPlan.fully_sharded("dp")),
            ("gpipe", ParallelPlan.data("dp")),
        )
        for schedule, plan in plans:
            torch.manual_seed(0)
            model = GPT(layers=2)
            twin = copy.deepcopy(model)
            stages = [Stage(model, index, 2) for index in range(2)]
            made = Pipeline(stages, procs, "pp", microbatches=4, schedule=schedule, plan=plan, inputs=["dp"])
            await check_training_is_that_of_plain_torch(made, twin)
            assert await trimesh.placements(made.stages[0].blocks[0].mlp.up.weight) == (
                ["dp", None] if schedule == "1f1b" else [None, None]
            )
        await check_what_is_refused(procs, made)
