"""Run the table of operators on the ranks and here, and compare."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from tests.tensor.operator_inputs import Inputs, values
from tests.tensor.operator_table import CASES
from torch.utils import _pytree as pytree

import trimesh
from trimesh import this_host
from trimesh._runtime.life.current import current_proc
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import upload
from trimesh.tensor.session.activation import active_team
from trimesh.tensor.session.opening import shapes_of

Runs = list[tuple[str, str]]
"""Names of cases, each with a way to hold tensors.

"active", "not active": a tensor on each rank, while the mesh is active or not. "global": cut where it can be.
"""

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


def _evaluate(name: str, inputs: Inputs) -> list[Any]:
    """Return the leaves of what a case computes, and the gradients of all that it takes."""
    leaves = pytree.tree_leaves(CASES[name](inputs))
    parts = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = [one for one in inputs.used if one.requires_grad]
    if not parts:
        return leaves
    loss = sum((one * one.conj()).real.sum() if one.is_complex() else one.float().square().sum() for one in parts)
    return [*leaves, *(one for one in torch.autograd.grad(loss, wanted, allow_unused=True) if one is not None)]


class Outcome:
    """What came of one case: leaves on each side, as tensors of this process; or why there are none."""

    def __init__(self, local: list[Any], metas: list[Any], ranks: list[Any], error: Exception | None) -> None:
        self.local = local
        self.metas = metas
        self.ranks = ranks
        self.error = error


def _by_rank(value: Any) -> list[torch.Tensor] | None:
    return value if value is None else [value] if isinstance(value, torch.Tensor) else list(value.values())


async def _outcome(name: str, procs: Any, found: dict[str, torch.Tensor], way: str) -> Outcome:
    with procs.activate():
        team = active_team()

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if way != "global":
            return upload(tensor, team)
        can_cut = tensor.ndim > 0 and len(tensor) % 2 == 0
        return trimesh.distribute(tensor, procs, ["gpus", *[None] * (tensor.ndim - 1)] if can_cut else None)

    try:
        local = _evaluate(name, Inputs(lambda tensor: tensor.clone(), found))
        with procs.activate() if way == "active" else nullcontext():
            there = _evaluate(name, Inputs(put, found))
        values = iter(await trimesh.fetch([one for one in there if isinstance(one, MeshTensor)]))
    except Exception as error:  # noqa: BLE001 - each case fails by itself
        return Outcome([], [], [], error)
    fetched = [next(values) if isinstance(one, MeshTensor) else None for one in there]
    metas = [(one.dtype, tuple(one.size()), one.stride()) if isinstance(one, torch.Tensor) else one for one in there]
    return Outcome(local, metas, [_by_rank(one) for one in fetched], None)


async def run_all(runs: Runs) -> tuple[dict[tuple[str, str], Outcome], set[str]]:
    """Return what came of each case, and the names of all operators that were issued."""
    outcomes = {}
    found = values()
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for name, way in runs:
            outcomes[name, way] = await _outcome(name, procs, found, way)
        names = {plan.name for plan in shapes_of(current_proc()).plans.values()}
    return outcomes, names


def check(name: str, way: str, outcome: Outcome) -> None:
    """Compare what came of one case."""
    # The ranks' parts of a sum are rounded before they are added.
    limits = {"rtol": 1e-2, "atol": 0.1} if name == "dtypes: bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    if outcome.error is not None:
        raise outcome.error
    assert len(outcome.local) == len(outcome.metas)
    for index, (expected, metas, ranks) in enumerate(zip(outcome.local, outcome.metas, outcome.ranks, strict=True)):
        if not isinstance(expected, torch.Tensor):
            assert metas == expected
            continue
        assert ranks is not None, f"result {index} is not on the ranks"
        for found in ranks:
            torch.testing.assert_close(found, expected.detach().resolve_conj(), equal_nan=True, **limits)
        assert metas[:2] == (expected.dtype, tuple(expected.size()))
        if way != "global":
            assert metas[2] == expected.stride(), f"result {index}"
