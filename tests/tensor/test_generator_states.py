"""What is computed again draws what it drew: the state of torch's generator takes those of the ranks along."""

from __future__ import annotations

from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

from torch.nn.functional import dropout  # noqa: E402 - after the skip
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

import trimesh  # noqa: E402
from trimesh import this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


def _dropped(x: Any) -> Any:
    return dropout(x, 0.5)


def _nested(x: Any) -> Any:
    return checkpoint(_dropped, checkpoint(_dropped, x, use_reentrant=False), use_reentrant=False) + dropout(x, 0.5)


def _checkpointed(x: Any, *, is_reentrant: bool) -> Any:
    return checkpoint(_dropped, x, use_reentrant=is_reentrant)


WAYS: dict[str, Any] = {
    "not reentrant": lambda x: _checkpointed(x, is_reentrant=False),
    "reentrant": lambda x: _checkpointed(x, is_reentrant=True),
    "nested": lambda x: checkpoint(_nested, x, use_reentrant=False),
    "sequential": lambda x: checkpoint_sequential([_dropped, _dropped], 2, x, use_reentrant=False),
    "drawn in between": lambda x: _checkpointed(x, is_reentrant=False) + 0 * dropout(x, 0.5),
}


async def _of_ranks(tensor: Any) -> list[Any]:
    found = await trimesh.fetch(tensor)
    return list(found.values()) if isinstance(found, trimesh.ValueMesh) else [found]


async def _run() -> dict[str, Any]:
    """Each way by each kind: the value and the gradient, which are equal at ones; and what else is asked here."""
    found: dict[str, Any] = {}
    preload = ("torch", "torch.distributed.tensor")
    async with this_host().spawn_procs({"dp": 2}, preload=preload) as procs:
        ones = trimesh.replicate(torch.ones(64), procs)
        leaves = {
            "local": ones.local().requires_grad_(), "global": trimesh.distribute(torch.ones(64), procs, ["dp"])
        }  # fmt: skip
        leaves["global"].requires_grad_()
        for kind, leaf in leaves.items():
            for name, way in WAYS.items():
                y = way(leaf)
                leaf.grad = None
                y.sum().backward()
                found[f"{kind}, {name}"] = await _of_ranks(y.detach()), await _of_ranks(leaf.grad)

        found["forked"] = []
        for leaf in leaves.values():
            with torch.random.fork_rng(devices=[]):
                first = dropout(leaf.detach(), 0.5)
            found["forked"].append((await _of_ranks(first), await _of_ranks(dropout(leaf.detach(), 0.5))))

        state = torch.get_rng_state()
        with procs.slice(dp=1).activate():
            late = torch.rand(8)
            own = torch.rand(8)
        torch.set_rng_state(state)
        with procs.slice(dp=1).activate():
            found["late view"] = [await _of_ranks(late), await _of_ranks(torch.rand(8))]
            torch.set_rng_state(state.clone())  # another tensor: the state of this process only
            found["another tensor"] = [await _of_ranks(own), await _of_ranks(torch.rand(8))]

        trimesh.manual_seed(3, procs)
        step = trimesh.compile(_gradient_of_checkpoint)
        found["recorded"] = []
        for _ in range(5):
            y, grad = step(leaves["global"])
            found["recorded"].append((await _of_ranks(y), await _of_ranks(grad)))
        found["is recorded"] = step.is_recorded
        found["is replaced"] = torch.get_rng_state.__module__, hasattr(torch.get_rng_state, "__wrapped__")
    found["is as it was"] = not hasattr(torch.get_rng_state, "__wrapped__")
    return found


def _gradient_of_checkpoint(x: Any) -> Any:
    y = _checkpointed(x, is_reentrant=False)
    return y, *torch.autograd.grad(y.sum(), x)


@pytest.fixture(scope="module")
def found() -> Any:
    """What was computed, on one mesh."""
    return trio.run(_run)


@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize("name", WAYS)
def test_a_checkpoint_draws_its_masks_again(found: Any, kind: str, name: str) -> None:
    values, grads = found[f"{kind}, {name}"]
    for value, grad in zip(values, grads, strict=True):
        assert torch.equal(value, grad)
        assert 0 < (value > 0).sum() < 64


def test_what_is_drawn_in_a_fork_is_drawn_again_after_it(found: Any) -> None:
    for first, second in found["forked"]:
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


def test_a_view_that_is_made_later_draws_again_what_it_drew(found: Any) -> None:
    [first], [second] = found["late view"]
    assert torch.equal(first, second)


def test_a_copy_of_the_state_is_that_of_this_process_only(found: Any) -> None:
    [own], [after] = found["another tensor"]
    assert torch.equal(own, after), "set_rng_state of another tensor moved the generators of the ranks"


def test_a_recorded_checkpoint_draws_new_masks_in_each_call_and_each_of_them_twice(found: Any) -> None:
    assert found["is recorded"]
    for values, grads in found["recorded"]:
        assert all(torch.equal(value, grad) for value, grad in zip(values, grads, strict=True))
    assert len({tuple(values[0].tolist()) for values, _ in found["recorded"]}) == 5


def test_torch_has_its_own_functions_again_after_the_last_mesh(found: Any) -> None:
    assert found["is replaced"] == ("torch.random", True)
    assert found["is as it was"]
