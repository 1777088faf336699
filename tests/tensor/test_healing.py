"""What a failed batch has poisoned becomes right again when all of it is overwritten, and no sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

import trimesh  # noqa: E402 - after the skip
from trimesh import this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.daily]

BATCHES = 4
FAILING = 1
"""The batch that cannot be computed."""


@trimesh.remote(propagate=lambda t: t)
def fail(t: Any) -> Any:
    raise MemoryError("no room for it")


def _failed(t: Any) -> Any:
    """Return what looks like a tensor, and could not be computed."""
    return fail(t.local(["dp", None])).to_global(["dp", None]) if "global" in repr(t) else fail(t)


HEALING: dict[str, Callable[[Any, Any], object]] = {
    "copy_": lambda t, good: t.copy_(good),
    "fill_": lambda t, _: t.fill_(2.0),
    "zero_": lambda t, _: t.zero_(),
    "an assignment to all of it": lambda t, good: t.__setitem__(slice(None), good),
    "by way of data": lambda t, good: t.data.copy_(good),
    "by way of detach": lambda t, good: t.detach().copy_(good),
    "_foreach_copy_": lambda t, good: torch._foreach_copy_([t], [good]),
    "_foreach_zero_": lambda t, _: torch._foreach_zero_([t]),
    "normal_": lambda t, _: t.normal_(),
}

LEAVING: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda _t, _good: None,
    "what reads it": lambda t, good: t.add_(good),
    "a copy of itself": lambda t, _: t.copy_(t),
    "a copy of something poisoned": lambda t, good: t.copy_(_failed(good)),
    "a part of it": lambda t, _: t[:1].fill_(1.0),
}


async def _state(tensor: Any) -> str:
    try:
        await trimesh.fetch(tensor)
    except trimesh.MeshErrorGroup as group:
        return "poisoned" if group.split((MemoryError, IndexError))[1] is None else repr(group.exceptions)
    return "healthy"


def _trained(procs: Any, *, set_to_none: bool, fails: bool) -> tuple[Any, list[Any]]:
    """Train; a batch whose loss cannot be computed is skipped."""
    torch.manual_seed(0)
    model = trimesh.module_to_mesh(torch.nn.Linear(3, 2), procs, {"weight": [None, "dp"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for number in range(BATCHES):
        if number == FAILING and not fails:
            continue
        x = trimesh.distribute(torch.ones(4, 3) * (number + 1), procs, ["dp", None])
        loss = model(_failed(x) if number == FAILING else x).square().sum()
        loss.backward()
        losses.append(loss.detach())
        if number != FAILING:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return model, losses


async def _run() -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        good = {"global": trimesh.distribute(torch.full((4, 3), 2.0), procs, ["dp", None])}
        good["local"] = good["global"].local(["dp", None])
        for kind, source in good.items():
            for name, change in {**HEALING, **LEAVING}.items():
                target = source * 3
                view, early = target.view(-1), target.detach()
                target.add_(_failed(target))
                late = target.detach()
                change(target, source)
                found[f"{kind}, {name}"] = [await _state(one) for one in (target, view, early, late)]

        base = good["local"] * 3
        half, other = base[:1], base[1:]
        base.add_(fail(base))
        half.fill_(5.0)
        found["a part"] = [await _state(one) for one in (half, base, other)]
        values = (await trimesh.fetch(half)).values()
        base.copy_(good["local"])
        found["then all"] = [await _state(one) for one in (half, base, other)]
        found["values"] = values[0].tolist(), (await trimesh.fetch(half)).values()[0].tolist()

        for set_to_none in (True, False):
            trained, losses = _trained(procs, set_to_none=set_to_none, fails=True)
            wanted, others = _trained(procs, set_to_none=set_to_none, fails=False)
            found[f"skipped, {set_to_none}"] = (
                await trimesh.fetch([*trained.parameters(), *losses[:FAILING], *losses[FAILING + 1 :]]),
                await trimesh.fetch([*wanted.parameters(), *others]),
                await _state(losses[FAILING]),
            )
        found["stepped"] = await _stepped(procs)
        found["copied views"] = await _through_views_that_are_copied(procs)
    return found


async def _stepped(procs: Any) -> list[Any]:
    """Take a step with a failed batch; then load what was saved."""
    model = trimesh.module_to_mesh(torch.nn.Linear(3, 2), procs, {"weight": [None, "dp"]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = await trimesh.fetch(model.state_dict())
    x = trimesh.distribute(torch.ones(4, 3), procs, ["dp", None])
    model(_failed(x)).sum().backward()
    optimizer.step()
    states = [await _state(model.weight.detach())]
    model.load_state_dict(saved)
    optimizer.zero_grad()
    states.append(await _state(model.weight.detach()))
    model(x).sum().backward()
    optimizer.step()
    wanted = saved["weight"] - 0.1 * 4
    return [*states, (await trimesh.placements(model.weight.detach())), await trimesh.fetch(model.weight), wanted]


async def _through_views_that_are_copied(procs: Any) -> list[Any]:
    """Fail to write through a row, which is on one rank alone; look at the tensor and its rows; heal the tensor."""
    t = trimesh.distribute(torch.arange(12.0).reshape(4, 3), procs, ["dp", None])
    row, other = t[0], t[3]
    beyond = trimesh.replicate(torch.tensor([0, 7]), procs)
    row[beyond] = 9.0
    found: list[Any] = [await _state(one) for one in (t, row, other, t[:2])]
    t[:2].fill_(1.0)
    found.append(await _state(row))
    t.copy_(trimesh.distribute(torch.full((4, 3), 2.0), procs, ["dp", None]))
    found += [await _state(one) for one in (t, row, other)]
    return [found, await trimesh.fetch([row, other])]


@pytest.fixture(scope="module")
def found() -> Any:
    """What was found, on one mesh."""
    return trio.run(_run)


@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize("name", HEALING)
def test_what_overwrites_all_of_a_tensor_heals_it_and_its_views(found: Any, kind: str, name: str) -> None:
    assert found[f"{kind}, {name}"] == ["healthy"] * 4


@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize("name", LEAVING)
def test_nothing_else_heals_it(found: Any, kind: str, name: str) -> None:
    assert found[f"{kind}, {name}"] == ["poisoned"] * 4


def test_a_part_heals_itself_and_the_whole_heals_all(found: Any) -> None:
    assert found["a part"] == ["healthy", "poisoned", "poisoned"]
    assert found["then all"] == ["healthy"] * 3
    assert found["values"] == ([[5.0] * 3], [[2.0] * 3])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_as_if_a_failed_batch_had_not_been(found: Any, set_to_none: bool) -> None:
    trained, wanted, failed = found[f"skipped, {set_to_none}"]
    assert failed == "poisoned"
    for one, other in zip(trained, wanted, strict=True):
        assert torch.equal(one, other)


def test_loading_a_state_heals_what_a_step_with_a_failed_batch_has_poisoned(found: Any) -> None:
    before, after, lies, weight, wanted = found["stepped"]
    assert (before, after, lies) == ("poisoned", "healthy", [None, "dp"])
    assert torch.allclose(weight, wanted)


def test_a_failed_write_through_a_view_that_is_copied_poisons_all_that_it_was_for(found: Any) -> None:
    states, rows = found["copied views"]
    assert states == ["poisoned"] * 5 + ["healthy"] * 3
    assert [row.tolist() for row in rows] == [[2.0] * 3] * 2
