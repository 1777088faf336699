"""Plans: what they say without processes, and a GPT that trains by each as plain torch trains it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, trained  # noqa: E402 - after the skip

from trimesh.tensor import ParallelPlan  # noqa: E402
from trimesh.tensor.parallel.explanation import Moved  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

BATCHES = 4
COLUMNS, ROWS = ["*.q", "*.k", "*.v", "*.gate", "*.up", "embed"], ["*.out", "*.down"]


def placements(plan: ParallelPlan, module: Any, extent: dict[str, int]) -> dict[str, Any]:
    """Return how each tensor lies, by its first name."""
    return {one.named.names[0]: list(one.placements(extent)) for one in plan.explain(module, extent).lying}


def test_plans_of_several_dimensions_are_put_together() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4), "norm": nn.LayerNorm(3)})
    tensor = ParallelPlan.tensor("tp", columns=["up"], rows=["down"])
    extent = {"dp": 2, "tp": 2}

    assert placements(tensor | ParallelPlan.data("dp"), model, extent) == {
        "up.weight": ["tp", None],
        "up.bias": ["tp"],
        "down.weight": [None, "tp"],
        "down.bias": [None],
        "norm.weight": [None],
        "norm.bias": [None],
    }
    assert placements(tensor | ParallelPlan.fully_sharded("dp"), model, extent) == {
        "up.weight": ["tp", "dp"],
        "up.bias": ["tp"],
        "down.weight": ["dp", "tp"],
        "down.bias": ["dp"],
        "norm.weight": ["dp"],
        "norm.bias": ["dp"],
    }


def test_a_pattern_says_placements_in_several_forms() -> None:
    from torch.distributed.tensor import Replicate, Shard

    model, extent = nn.Linear(4, 6), {"dp": 2, "tp": 2}
    for where in (["tp", None], {"tp": 0}, {"tp": -2}, {"tp": Shard(0)}, {"tp": Shard(0), "dp": None}):
        assert placements(ParallelPlan({"weight": where}), model, extent)["weight"] == ["tp", None]
    for where in (None, [None, None], {"dp": Replicate()}):
        kept_whole = ParallelPlan({"weight": where}) | ParallelPlan.fully_sharded("dp")
        assert placements(kept_whole, model, extent) == {"weight": [None, None], "bias": ["dp"]}
    assert placements(ParallelPlan({"*ght": {"tp": 0}, "we*": {"dp": 1}}), model, extent)["weight"] == ["tp", "dp"]


def test_small_parameters_and_buffers_are_not_fully_sharded() -> None:
    norm = nn.BatchNorm1d(3)

    assert set(map(str, placements(ParallelPlan.fully_sharded("dp"), norm, {"dp": 4}).values())) == {"[None]", "[]"}
    by_name = placements(ParallelPlan.fully_sharded("dp"), norm, {"dp": 2})
    assert (by_name["weight"], by_name["running_mean"]) == (["dp"], [None])


def test_a_plan_that_does_not_fit_names_what_does_not() -> None:
    model, extent = nn.Linear(4, 6), {"dp": 2, "tp": 2}

    def refused(plan: ParallelPlan) -> str:
        with pytest.raises(ShapeError) as caught:
            plan.explain(model, extent)
        return str(caught.value)

    assert "got 'wait', 'bios' for ['weight', 'bias']" in refused(
        ParallelPlan({"wait": None, "b*": None, "bios": None})
    )
    assert "must agree along 'tp', got 'w*': {'tp': 0} and '*t': [None, 'tp'] for 'weight'" in refused(
        ParallelPlan({"w*": {"tp": 0}}) | ParallelPlan({"*t": [None, "tp"]})
    )
    assert "weight: the dimension to cut along 'tp' must be one of 2, or None, got 2, by 'w*'" in refused(
        ParallelPlan({"w*": {"tp": 2}})
    )
    assert "its mesh, ['dp', 'tp'], got 'gpus', by 'w*'" in refused(ParallelPlan({"w*": {"gpus": 0}}))
    assert "by '*'" in refused(ParallelPlan({"*": ["tp", None]}))
    assert "dimensions of the mesh, ['dp', 'tp'], got 'ep'" in refused(ParallelPlan.data("ep"))
    with pytest.raises(TypeError, match=r"write rows=\['down'\]"):
        ParallelPlan.tensor("tp", rows="down")


def test_patterns_of_a_shared_parameter_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"got 'embed.weight': \{'tp': 0\} and 'head.weight': \{'tp': 1\}"):
        ParallelPlan({"embed.weight": {"tp": 0}, "head.weight": {"tp": 1}}).explain(GPT(), {"tp": 2})


def test_an_explanation_counts_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))  # 144 and 60 bytes
    model[1].bias.requires_grad_(False)
    tensor = ParallelPlan.tensor("tp", columns=["0"])

    data = (tensor | ParallelPlan.data("dp")).explain(model, {"dp": 4, "tp": 2})
    assert (data.bytes_whole, data.bytes_on_rank) == (204, 64 + 8 + 48 + 12)
    assert data.moved == {"dp": Moved(reduced=2 * 3 * (64 + 8 + 48) // 4), "tp": Moved()}
    sharded = ParallelPlan.fully_sharded("dp").explain(model, {"dp": 4})
    assert sharded.bytes_on_rank == 32 + 4 + 12 + 12  # a bias of 3 elements is whole
    assert sharded.moved == {"dp": Moved(gathered=(128 + 16 + 48) * 3 // 4, scattered=(128 + 16 + 48) * 3 // 4)}
    text = str(sharded)
    assert "0.weight  (4, 8)  ['dp', None]  32               fully sharded along 'dp'" in text
    assert "a rank holds 60 bytes of 204" in text
    assert "along 'dp' (4 ranks) a step sends 144 bytes of parameters" in text
    assert str(tensor) in str(tensor | ParallelPlan.data("dp"))


async def check_training_is_that_of_plain_torch(procs: ProcMesh, plan: ParallelPlan, inputs: Any) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2)
    twin = copy.deepcopy(model)
    batches = [tuple(torch.randint(0, VOCABULARY, (2, 8, LENGTH))) for _ in range(BATCHES)]
    trimesh.module_to_mesh(model, procs, plan)
    found = trained(model, batches, lambda one: trimesh.distribute(one, procs, inputs))
    expected = trained(twin, batches, lambda one: one)

    assert torch.allclose(torch.stack(await trimesh.fetch(found)), torch.stack(expected), atol=1e-5)
    for name, value in (await trimesh.fetch(model.state_dict())).items():
        assert torch.allclose(value, twin.state_dict()[name], atol=1e-5), name


async def check_parameters_are_brought_together_while_their_module_runs(procs: ProcMesh) -> None:
    model: Any = trimesh.module_to_mesh(nn.Linear(4, 6), procs, ParallelPlan.fully_sharded("gpus"))
    during: list[Any] = []
    parameter = model.weight

    def look(*_: Any) -> None:
        during.append(model.weight)

    model.register_forward_hook(look, prepend=True)
    model(trimesh.distribute(torch.ones(8, 4), procs, ["gpus", None])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()

    assert await trimesh.placements(during[0]) == [None, None]
    assert model.weight is parameter
    assert await trimesh.placements(parameter) == ["gpus", None]
    assert await trimesh.placements(parameter.grad) == ["gpus", None]
    assert torch.equal(await trimesh.fetch(parameter.grad), torch.full((6, 4), 8.0))
    with pytest.raises(RuntimeError):
        model(trimesh.distribute(torch.ones(8, 5), procs))
    assert model.weight is parameter
    with pytest.raises(ShapeError, match="must agree along 'gpus'"):
        trimesh.module_to_mesh(nn.Linear(4, 6), procs, ParallelPlan({"w*": {"gpus": 0}, "*t": None}))


@pytest.mark.daily
@pytest.mark.real
async def test_a_gpt_trains_as_plain_torch_does_on_two_ranks() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        for plan, inputs in (
            (ParallelPlan.data("gpus"), ["gpus", None]),
            (ParallelPlan.fully_sharded("gpus"), ["gpus", None]),
            (ParallelPlan.tensor("gpus", columns=COLUMNS, rows=ROWS), None),
        ):
            await check_training_is_that_of_plain_torch(procs, plan, inputs)
        assert await trimesh.tensor.fallbacks(procs) == {}
        await check_parameters_are_brought_together_while_their_module_runs(procs)


@pytest.mark.real
async def test_a_gpt_trains_as_plain_torch_does_on_four_ranks() -> None:
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        tensor = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS)
        for plan, inputs in (
            (tensor | ParallelPlan.data("dp"), ["dp", None]),
            (tensor | ParallelPlan.fully_sharded("dp"), ["dp", None]),
            (ParallelPlan.fully_sharded("dp") | ParallelPlan.fully_sharded("tp"), [("dp", "tp"), None]),
        ):
            await check_training_is_that_of_plain_torch(procs, plan, inputs)
