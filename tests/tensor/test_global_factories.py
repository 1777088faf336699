"""`activate(global_tensors=True)`: what torch's factories make is one global tensor, and code that needs that runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

import trimesh  # noqa: E402 - after the skip
from trimesh import ShapeError, this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]

STEPS = 5


def _causal(x: Any) -> Any:
    mask = torch.triu(torch.ones(4, 4), 1).bool()
    return (x @ x.mT).masked_fill(mask, float("-inf")).softmax(-1) + torch.arange(4.0)


FACTORIES: dict[str, Any] = {
    "arange": lambda _: torch.arange(5),
    "a mask and a number": _causal,
    "data": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
    "eye and linspace": lambda x: torch.eye(4) * torch.linspace(0, 1, 4) + torch.full((4,), 2.0) + x,
    "rand": lambda _: (torch.rand(3, 5), torch.randn(20), torch.randint(7, (9,)), torch.randint(2, 5, (3, 3))),
    "normal": lambda _: torch.normal(2.0, 0.5, (4, 6)),
}


def _trained(model: Any, inputs: list[Any], *, is_recorded: bool, **options: Any) -> tuple[list[Any], bool]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    called = trimesh.compile(step) if is_recorded else step
    losses = [called(x).detach() for x in inputs]
    return losses, bool(getattr(called, "is_recorded", False))


def _scaled(model: Any, x: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return next(model.parameters()).detach()


async def _run() -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    net, lstm = torch.nn.Linear(4, 4), torch.nn.LSTM(4, 3, batch_first=True)
    inputs = [torch.randn(8, 4) for _ in range(STEPS)]
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        there = trimesh.distribute(x, procs, ["dp", None])
        for name, make in FACTORIES.items():
            torch.manual_seed(5)
            wanted = make(x)
            trimesh.manual_seed(5, procs)
            with procs.activate(global_tensors=True):
                made = make(there)
            found[name] = await trimesh.fetch(made), wanted, repr(made)

        put = [trimesh.distribute(one, procs, ["dp", None]) for one in inputs]
        moved = trimesh.module_to_mesh(copy.deepcopy(net), procs, {"weight": ["dp", None]})
        with procs.activate(global_tensors=True):
            losses, found["is recorded"] = _trained(moved, put, is_recorded=True, fused=True)
            state = trimesh.module_to_mesh(copy.deepcopy(lstm), procs)(trimesh.distribute(x[None], procs))[0]
            scaled = _scaled(trimesh.module_to_mesh(copy.deepcopy(net), procs), there)
        found["optimizer"] = await trimesh.fetch(losses), _trained(copy.deepcopy(net), inputs, is_recorded=False)[0]
        found["LSTM"] = await trimesh.fetch(state), lstm(x[None])[0]
        found["GradScaler"] = await trimesh.fetch(scaled), _scaled(copy.deepcopy(net), x)

        with procs.activate(global_tensors=True):
            with procs.activate():
                found["within"] = repr(torch.ones(2))
            with pytest.raises(NotImplementedError, match=r"got randperm: write trimesh\.replicate"):
                torch.randperm(4)
        with pytest.raises(ShapeError, match="every rank"):
            procs.exclude([{"dp": 0}]).activate(global_tensors=True)
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    """What was made, on one mesh."""
    return trio.run(_run)


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_what_torch_makes(found: Any, name: str) -> None:
    made, wanted, shown = found[name]
    assert "<global tensor" in shown
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("name", ["optimizer", "LSTM", "GradScaler"])
def test_code_that_makes_tensors_beside_global_ones_computes_what_it_does_here(found: Any, name: str) -> None:
    made, wanted = found[name]
    torch.testing.assert_close(made, wanted)


def test_a_fused_optimizer_of_global_parameters_is_recorded(found: Any) -> None:
    assert found["is recorded"]


def test_blocks_nest(found: Any) -> None:
    assert "<tensor" in found["within"]
