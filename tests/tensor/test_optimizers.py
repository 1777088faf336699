"""Torch's optimizers train on the ranks as they do here, step for step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.test_gradients import net, on_mesh  # noqa: E402
from torch import nn  # noqa: E402 - after the skip

from trimesh.tensor.controller.upload import upload  # noqa: E402
from trimesh.tensor.session.activation import active_team  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]

STEPS = 5

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params, **options: torch.optim.SGD(params, lr=0.05, **options),
    "SGD with momentum": lambda params, **options: torch.optim.SGD(params, lr=0.05, momentum=0.9, **options),
    "Nesterov": lambda params, **options: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, **options
    ),
    "Adam": lambda params, **options: torch.optim.Adam(params, lr=0.01, amsgrad=True, **options),
    "AdamW": lambda params, **options: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **options),
    "RMSprop": lambda params, **options: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5, **options),
    "Adagrad": lambda params, **options: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.1, **options),
    "NAdam": lambda params, **options: torch.optim.NAdam(params, lr=0.01, **options),
    "Adadelta": lambda params, **options: torch.optim.Adadelta(params, lr=1.0, **options),
}

SCHEDULES: dict[str, Callable[..., Any]] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
}


def train(model: Any, make: Callable[..., Any], batches: list[tuple[Any, Any]], schedule: Any = None) -> list[Any]:
    """Train in groups of two learning rates; return the losses."""
    weights = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() == 1]
    optimizer = make([{"params": weights}, {"params": others, "lr": 0.02}])
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses


def batches() -> list[tuple[Any, Any]]:
    torch.manual_seed(9)
    return [(torch.randn(6, 5), torch.randn(6, 3)) for _ in range(STEPS)]


async def differences(procs: Any, make: Callable[..., Any], schedule: Any = None, *, is_active: bool = False) -> float:
    """Return by how much losses and weights after training on the ranks are not what they are here."""
    with procs.activate():
        team = active_team()
    local = net()
    model = on_mesh(net(), lambda tensor: upload(tensor, team))
    expected = train(local, make, batches(), schedule)
    data = [(upload(x, team), upload(y, team)) for x, y in batches()]
    if is_active:
        with procs.activate():
            losses = train(model, make, data, schedule)
    else:
        losses = train(model, make, data, schedule)
    found = await trimesh.fetch([*losses, *model.parameters()])
    assert expected[-1] != expected[0]
    return max(
        float((one.detach() - other).abs().max())
        for one, others in zip([*expected, *local.parameters()], found, strict=True)
        for other in others.values()
    )


@pytest.mark.daily
async def test_optimizers_train_on_ranks_as_in_this_process() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for name, make in OPTIMIZERS.items():
            for foreach in (False, True):
                assert await differences(procs, partial(make, foreach=foreach)) < 1e-5, (name, foreach)


async def test_learning_rates_follow_their_schedule() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for name, schedule in SCHEDULES.items():
            assert await differences(procs, OPTIMIZERS["AdamW"], schedule) < 1e-5, name


async def test_optimizers_train_while_the_mesh_is_active() -> None:
    """There the step counts of an optimizer are on the ranks, too."""
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for name in ("SGD with momentum", "AdamW", "RMSprop"):
            for foreach in (False, True):
                make = OPTIMIZERS[name]
                found = await differences(procs, partial(make, foreach=foreach), is_active=True)
                assert found < 1e-5, (name, foreach)


async def test_state_of_an_optimizer_can_be_taken_out_and_loaded() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            team = active_team()
        weight = nn.Parameter(upload(torch.ones(3), team))
        local = nn.Parameter(torch.ones(3))
        for parameter in (weight, local):
            first = torch.optim.AdamW([parameter], lr=0.1)
            parameter.square().sum().backward()
            first.step()
            second = torch.optim.AdamW([parameter], lr=0.5)
            second.load_state_dict(first.state_dict())
            second.step()

        assert torch.allclose(await trimesh.fetch_shard(weight, gpus=1), local.detach())
