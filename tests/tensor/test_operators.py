"""Operators of torch compute on the ranks what they compute here, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import trio

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.operator_inputs import Inputs, values  # noqa: E402
from tests.tensor.operator_table import CASES  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402 - after the skip

from trimesh._runtime.context import current_proc  # noqa: E402
from trimesh.tensor.activation import active_team  # noqa: E402
from trimesh.tensor.opening import shapes_of  # noqa: E402
from trimesh.tensor.tensor import MeshTensor  # noqa: E402
from trimesh.tensor.upload import upload  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]

OPERATORS_MIN = 150
"""Distinct operators that must have been compared."""

MAKING = (
    "factories: zeros",
    "factories: ranges",
    "factories: windows",
    "factories: data",
    "factories: indices",
    "shapes: vander",
    "in place: out",
)
"""Cases that make tensors of nothing: on the ranks only while the mesh is active."""

RUNS = [(name, is_active) for name in CASES for is_active in (True, False) if is_active or name not in MAKING]


def _evaluate(name: str, inputs: Inputs) -> list[Any]:
    """Return the leaves of what a case computes, and the gradients of all that it takes."""
    leaves = pytree.tree_leaves(CASES[name](inputs))
    parts = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = [one for one in inputs.used if one.requires_grad]
    if not parts:
        return leaves
    loss = sum((one * one.conj()).real.sum() if one.is_complex() else one.float().square().sum() for one in parts)
    return [*leaves, *(one for one in torch.autograd.grad(loss, wanted, allow_unused=True) if one is not None)]


class _Outcome:
    """What came of one case: leaves on each side, as tensors of this process; or why there are none."""

    def __init__(self, local: list[Any], looks: list[Any], ranks: list[Any], error: Exception | None) -> None:
        self.local = local
        self.looks = looks
        self.ranks = ranks
        self.error = error


async def _outcome(name: str, procs: Any, found: dict[str, torch.Tensor], *, is_active: bool) -> _Outcome:
    with procs.activate():
        team = active_team()
    try:
        local = _evaluate(name, Inputs(lambda tensor: tensor.clone(), found))
        with procs.activate() if is_active else nullcontext():
            there = _evaluate(name, Inputs(lambda tensor: upload(tensor, team), found))
        fetched = [(await trimesh.fetch(one)).values() if isinstance(one, MeshTensor) else None for one in there]
    except Exception as error:  # noqa: BLE001 - each case fails by itself
        return _Outcome([], [], [], error)
    looks = [(one.dtype, tuple(one.size()), one.stride()) if isinstance(one, torch.Tensor) else one for one in there]
    return _Outcome(local, looks, fetched, None)


async def _run_all() -> tuple[dict[tuple[str, bool], _Outcome], set[str]]:
    outcomes = {}
    found = values()
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for name, is_active in RUNS:
            outcomes[name, is_active] = await _outcome(name, procs, found, is_active=is_active)
        names = {plan.name for plan in shapes_of(current_proc()).plans.values()}
    return outcomes, names


@pytest.fixture(scope="module")
def everything() -> tuple[dict[tuple[str, bool], _Outcome], set[str]]:
    """All cases on one mesh: a mesh for each would take minutes."""
    return trio.run(_run_all)


@pytest.mark.parametrize(
    ("name", "is_active"), RUNS, ids=[f"{name}{'' if on else ', not active'}" for name, on in RUNS]
)
def test_operators_compute_on_ranks_what_they_compute_here(everything: Any, name: str, is_active: bool) -> None:
    outcome = everything[0][name, is_active]

    if outcome.error is not None:
        raise outcome.error
    assert len(outcome.local) == len(outcome.looks)
    for index, (expected, looks, ranks) in enumerate(zip(outcome.local, outcome.looks, outcome.ranks, strict=True)):
        if not isinstance(expected, torch.Tensor):
            assert looks == expected
            continue
        assert ranks is not None, f"result {index} is not on the ranks"
        for found in ranks:
            torch.testing.assert_close(found, expected.detach().resolve_conj(), equal_nan=True, rtol=1e-4, atol=1e-5)
        assert looks[:2] == (expected.dtype, tuple(expected.size()))
        if expected.is_leaf is False or not expected.requires_grad:
            assert looks[2] == expected.stride(), f"result {index}"


def test_many_operators_were_compared(everything: Any) -> None:
    operators = {name.partition("::")[2].partition(".")[0] for name in everything[1] if name.startswith("aten::")}

    assert len(operators) >= OPERATORS_MIN, sorted(operators)
