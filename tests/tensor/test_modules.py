"""Modules on a mesh train to the losses of their local twins; all on one mesh, which takes seconds to start."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

TENSOR_PARALLEL = {"up.weight": ["tp", None], "up.bias": ["tp"], "down.weight": [None, "tp"]}


def network() -> Any:
    """Make a block of a transformer's kind, small."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.norm, self.predict = nn.LayerNorm(8), nn.Linear(8, 11)
            self.predict.weight = self.embed.weight

        def forward(self, text: Any) -> Any:
            hidden = self.embed(text)
            q = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            hidden = hidden + mixed.transpose(1, 2).flatten(2)
            hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
            return self.predict(self.norm(hidden))

    torch.manual_seed(3)
    return Net()


@pytest.mark.daily
async def test_modules() -> None:
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        await check_training_equals_local_training(procs)
        await check_gradients_are_added_up_once(procs)
        await check_state_goes_out_and_in(procs)
        await check_training_goes_on_from_a_saved_state(procs)
        await check_buffers_are_moved(procs)
        await check_parameters_keep_what_they_are(procs)
        check_plans_that_do_not_fit_are_refused(procs)


def cases() -> list[tuple[Callable[[Any], Any], Any]]:
    return [
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), None),
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), TENSOR_PARALLEL),
        (lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True), TENSOR_PARALLEL),
        (lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1), None),
    ]


async def check_training_equals_local_training(procs: ProcMesh) -> None:
    text = torch.randint(0, 11, (6, 5))
    goal = torch.randint(0, 11, (6, 5))
    there, goal_there = (trimesh.distribute(one, procs, ["dp", None]) for one in (text, goal))
    for make, plan in cases():
        twin, model = network(), trimesh.module_to_mesh(network(), procs, plan)
        optimizer, twin_optimizer = make(model.parameters()), make(twin.parameters())
        for _ in range(4):
            expected = step(twin, twin_optimizer, text, goal)
            found = step(model, optimizer, there, goal_there)
            assert abs(found.item() - expected.item()) < 1e-5
        trained = await trimesh.fetch(model.state_dict())
        for name, value in twin.state_dict().items():
            assert torch.allclose(trained[name], value, atol=1e-4), name


def step(model: Any, optimizer: Any, text: Any, goal: Any) -> Any:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(text).flatten(0, 1), goal.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.detach()


async def check_gradients_are_added_up_once(procs: ProcMesh) -> None:
    """Data parallel training leaves a sum of parts; the first step of the optimizer adds it up, and keeps that."""
    model = trimesh.module_to_mesh(nn.Linear(4, 3, bias=False), procs)
    model(trimesh.distribute(torch.ones(8, 4), procs, ["dp", None])).sum().backward()
    if torch.__version__ >= (2, 13):  # with older releases it is added up by the first that reads it
        assert (await trimesh.placements(model.weight.grad)).partial == {"dp": "sum"}
    torch.optim.Adam(model.parameters()).step()
    assert await trimesh.placements(model.weight.grad) == [None, None]
    assert torch.equal(await trimesh.fetch(model.weight.grad), torch.full((3, 4), 8.0))


async def check_state_goes_out_and_in(procs: ProcMesh) -> None:
    twin = network()
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    model = trimesh.module_to_mesh(network(), procs, TENSOR_PARALLEL)
    model.load_state_dict(twin.state_dict())
    assert await trimesh.placements(model.up.weight) == ["tp", None]
    file = io.BytesIO()
    torch.save(await trimesh.fetch(model.state_dict()), file)
    file.seek(0)
    saved = torch.load(file)
    assert all(torch.equal(saved[name], value) for name, value in twin.state_dict().items())
    model.norm.load_state_dict({"weight": torch.zeros(8), "bias": torch.ones(8)})
    assert (await trimesh.fetch(model.norm.weight)).sum() == 0
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.norm.load_state_dict({"weight": torch.zeros(9), "bias": torch.ones(8)})
    with torch.no_grad(), pytest.raises(TypeError, match="a tensor of this process"):
        model.norm.weight.copy_(torch.zeros(8))
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.norm.bias.zero_()
    assert (await trimesh.fetch(average.norm.bias)).sum() == 8


async def check_training_goes_on_from_a_saved_state(procs: ProcMesh) -> None:
    text, goal = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    there, goal_there = (trimesh.distribute(one, procs, ["dp", None]) for one in (text, goal))
    losses = []
    model = trimesh.module_to_mesh(network(), procs, TENSOR_PARALLEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(2):
        step(model, optimizer, there, goal_there)
    saved = await trimesh.fetch([model.state_dict(), optimizer.state_dict()])
    losses.append([step(model, optimizer, there, goal_there).item() for _ in range(3)])
    again = trimesh.module_to_mesh(network(), procs)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.02)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    trimesh.optimizer_to_mesh(optimizer)
    losses.append([step(again, optimizer, there, goal_there).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


async def check_buffers_are_moved(procs: ProcMesh) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model = trimesh.module_to_mesh(copy.deepcopy(twin), procs)
    batch = torch.randn(8, 4)
    for _ in range(2):
        expected = twin(batch).square().mean()
        found = model(trimesh.distribute(batch, procs, ["dp", None])).square().mean()
        assert abs(found.item() - expected.item()) < 1e-5
    state = await trimesh.fetch(model.state_dict())
    for name, value in twin.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-5), name


async def check_parameters_keep_what_they_are(procs: ProcMesh) -> None:
    local = network()
    local.up.bias.requires_grad_(requires_grad=False)
    local.norm.weight.decays = False
    model = trimesh.module_to_mesh(local, procs)
    assert model is local
    assert model.predict.weight is model.embed.weight
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert not model.up.bias.requires_grad
    assert model.norm.weight.decays is False


def check_plans_that_do_not_fit_are_refused(procs: ProcMesh) -> None:
    with pytest.raises(ShapeError, match=r"must fit a parameter or buffer, got 'upp\.\*'"):
        trimesh.module_to_mesh(network(), procs, {"upp.*": None})
    with pytest.raises(ShapeError, match=r"up\.bias: placements must have an entry for each"):
        trimesh.module_to_mesh(network(), procs, {"up.*": ["tp", None]})
    model = trimesh.module_to_mesh(network(), procs)
    with pytest.raises(TypeError, match=r"'embed\.weight' is on a mesh already"):
        trimesh.module_to_mesh(model, procs)
