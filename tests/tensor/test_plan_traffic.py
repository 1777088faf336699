"""Plans that share out optimizers, activations and experts: equal to plain torch, and what they send as explained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.experts import MixtureOfExperts  # noqa: E402 - after the skip
from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, WIDTH  # noqa: E402

from trimesh.tensor import ParallelPlan  # noqa: E402
from trimesh.tensor.parallel.explanation import Moved  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
COLUMNS, ROWS = ["*.q", "*.k", "*.v", "*.gate", "*.up", "embed", "head"], ["*.out", "*.down"]
STEPS = 2


def gpt() -> tuple[Any, Any]:
    return GPT(layers=2), torch.randint(0, VOCABULARY, (8, LENGTH))


def mixture() -> tuple[Any, Any]:
    return nn.Sequential(MixtureOfExperts(4, WIDTH, 5), nn.LayerNorm(WIDTH)), torch.randn(8, 12, WIDTH)


async def check_steps(
    procs: ProcMesh, plan: ParallelPlan, make: Callable[[], tuple[Any, Any]], placements: Any, *, passes: int = 1
) -> Any:
    """Train beside plain torch; every step after the first sends what was explained, and no more."""
    torch.manual_seed(0)
    model, example = make()
    twin = copy.deepcopy(model)
    explained = plan.explain(model, procs, [example]).moved
    trimesh.module_to_mesh(model, procs, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trimesh.optimizer_to_mesh(optimizer)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    there = trimesh.distribute(example, procs, placements)
    for _ in range(STEPS):
        before = await trimesh.tensor.traffic(procs)
        for _ in range(passes):
            model(there).square().sum().backward()
            twin(example).square().sum().backward()
        optimizer.step()
        other.step()
        after = await trimesh.tensor.traffic(procs)
        for label, moved in explained.items():
            a_pass = moved.activations + (moved.scattered if plan.scatters_gradients(label) else 0)
            expected = moved.all + (passes - 1) * a_pass
            assert after.sent(label) - before.sent(label) == expected, (plan, label, after, before)
        optimizer.zero_grad()
        other.zero_grad()
    for name, value in (await trimesh.fetch(model.state_dict())).items():
        assert torch.allclose(value, twin.state_dict()[name], atol=1e-4), (plan, name)
    return model, optimizer


@pytest.mark.real
@pytest.mark.stress
async def test_what_is_sent_on_two_ranks_is_what_was_explained() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        cut = ["gpus", None]
        await check_steps(procs, ParallelPlan.data("gpus"), gpt, cut, passes=2)
        await check_steps(procs, ParallelPlan.fully_sharded("gpus"), gpt, cut)
        for gradients in (False, True):
            plan = ParallelPlan.optimizer_sharded("gpus", gradients=gradients)
            model, optimizer = await check_steps(procs, plan, gpt, cut, passes=2)
            weight = model.blocks[0].mlp.up.weight
            assert await trimesh.placements(weight) == [None, None]
            assert await trimesh.placements(optimizer.state[weight]["exp_avg"]) == ["gpus", None]
        tensor = ParallelPlan.tensor("gpus", columns=COLUMNS, rows=ROWS, sequence=True)
        model, _ = await check_steps(procs, tensor, gpt, None)
        seen: list[Any] = []
        model.blocks[1].norm1.register_forward_hook(lambda _part, _args, made: seen.append(made.detach()))
        model(trimesh.distribute(torch.zeros(8, LENGTH).long(), procs))
        assert await trimesh.placements(seen[0]) == [None, "gpus", None]
        model, _ = await check_steps(procs, ParallelPlan.context("gpus"), gpt, [None, "gpus"])
        seen.clear()
        model.blocks[1].mlp.down.register_forward_hook(lambda _part, _args, made: seen.append(made.detach()))
        model(trimesh.distribute(torch.zeros(8, LENGTH).long(), procs, [None, "gpus"]))
        assert await trimesh.placements(seen[0]) == [None, "gpus", None]
        experts = ParallelPlan.expert("gpus", ["0.experts"])
        model, _ = await check_steps(procs, experts, mixture, ["gpus", None, None])
        assert await trimesh.placements(model[0].experts.up) == ["gpus", None, None]
        assert await trimesh.tensor.fallbacks(procs) == {}


@pytest.mark.real
async def test_what_is_sent_on_four_ranks_is_what_was_explained() -> None:
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as procs:
        tensor = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS, sequence=True)
        await check_steps(procs, tensor | ParallelPlan.data("dp"), gpt, ["dp", None])
        await check_steps(procs, tensor | ParallelPlan.optimizer_sharded("dp", gradients=True), gpt, ["dp", None])
        await check_steps(procs, ParallelPlan.context("tp") | ParallelPlan.data("dp"), gpt, ["dp", "tp"])
        experts = ParallelPlan.expert("tp", ["0.experts"]) | ParallelPlan.data("dp")
        await check_steps(procs, experts, mixture, [("dp", "tp"), None, None])


def test_an_explanation_with_an_example_counts_activations() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    plan = ParallelPlan.tensor("tp", columns=["0"], rows=["1"], sequence=True)
    example = torch.zeros(2, 4, 8)

    explained = plan.explain(model, {"tp": 4}, [example])
    # 256 bytes go in, for which nothing needs a gradient, and 256 come out, of which there is one.
    assert explained.moved == {"tp": Moved(activations=256 * 3 // 4 * 3)}
    assert "and 576 of activations" in str(explained)
    assert plan.explain(model, {"tp": 4}).moved == {"tp": Moved()}
    assert "with activations cut along 'tp'" in repr(plan)
    with pytest.raises(ShapeError, match=r"must fit a parameter or buffer, got 'x\.\*'"):
        (plan | ParallelPlan.expert("tp", ["x"])).explain(model, {"tp": 4})


def test_an_explanation_counts_the_attention_of_contexts() -> None:
    model, example = gpt()
    explained = ParallelPlan.context("cp").explain(model, {"cp": 4}, [example])
    # Keys and values of 8 x 8 x 16 floats, in two layers, go forth twice and their gradients back.
    assert explained.moved["cp"].activations == 8 * 8 * 16 * 4 * 2 * 2 * 3 * 3 // 4
    assert explained.moved["cp"].reduced > 0
    both = ParallelPlan.context("cp") | ParallelPlan.tensor("tp", columns=["*.q"])
    assert both.explain(model, {"cp": 2, "tp": 2}).activations is None
    with pytest.raises(ShapeError, match=r"if heads are whole, got parameters cut along \['tp'\]"):
        both.explain(model, {"cp": 2, "tp": 2}, [example])
    assert "ParallelPlan.context('cp')" in repr(both)


def test_optimizers_keep_parts_of_what_can_be_cut() -> None:
    model, extent = nn.Linear(4, 6), {"dp": 2}
    shared = ParallelPlan.optimizer_sharded("dp").explain(model, extent)

    assert shared.bytes_on_rank == shared.bytes_whole
    assert [list(one.state_placements(extent)) for one in shared.lying] == [["dp", None], ["dp"]]
    assert shared.moved == {"dp": Moved(gathered=60, scattered=60)}
    assert "its optimizer's state cut along 'dp'" in str(shared)


@pytest.mark.real
async def test_what_is_laid_out_anew_is_row_major_as_its_handle_says() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        here = torch.arange(24.0).view(4, 6)
        there = trimesh.distribute(here, procs, [None, "dp"]).t()
        moved = trimesh.redistribute(there, [None, "dp"])
        assert torch.equal(await trimesh.fetch(moved.view(-1)), here.t().reshape(-1))
        weight = there.detach().requires_grad_()
        (trimesh.redistribute(weight, None).t() * trimesh.distribute(here, procs)).sum().backward()
        assert torch.equal(await trimesh.fetch(weight.grad.reshape(-1)), here.t().reshape(-1))


@pytest.mark.real
async def test_gradients_that_are_asked_for_are_not_added_to_those_of_before() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        model: Any = trimesh.module_to_mesh(nn.Linear(4, 6), procs, ParallelPlan.data("dp"))
        there = trimesh.distribute(torch.ones(8, 4), procs, ["dp", None])
        for times in (1, 2):
            model(there).sum().backward()
            [asked] = torch.autograd.grad(model(there).sum(), [model.weight])
            assert torch.equal(await trimesh.fetch(asked), torch.full((6, 4), 8.0))
            assert torch.equal(await trimesh.fetch(model.weight.grad), torch.full((6, 4), 8.0 * times))


@pytest.mark.real
async def test_an_optimizer_of_parts_takes_no_closure() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        model = trimesh.module_to_mesh(nn.Linear(4, 6), procs, ParallelPlan.optimizer_sharded("dp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trimesh.optimizer_to_mesh(optimizer)
        with pytest.raises(TypeError, match="without a closure"):
            optimizer.step(lambda: 0.0)
        assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]


@pytest.mark.real
async def test_an_optimizer_of_parts_has_its_parameters_back_after_a_step_that_fails() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        model: Any = trimesh.module_to_mesh(nn.Linear(4, 6), procs, ParallelPlan.optimizer_sharded("dp"))
        for has_schedule_first in (False, True):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if has_schedule_first:
                torch.optim.lr_scheduler.ConstantLR(optimizer)
                trimesh.optimizer_to_mesh(optimizer)
            else:
                trimesh.optimizer_to_mesh(optimizer)
                torch.optim.lr_scheduler.ConstantLR(optimizer)
            model(trimesh.distribute(torch.ones(8, 4), procs, ["dp", None])).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = None
            with pytest.raises(TypeError):
                optimizer.step()
            assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
            assert {id(one) for one in optimizer.state} == {id(one) for one in model.parameters()}
            assert optimizer.state_dict()["state"].keys() == {0, 1}
