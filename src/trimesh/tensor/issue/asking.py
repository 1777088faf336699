"""Operators whose results have shapes that follow from values: issued, and then the ranks are asked (rule N2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from trimesh.tensor.controller.answers import answers_now
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.expected import metas_of
from trimesh.tensor.controller.plan import FRESH, Plan
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import make, make_held
from trimesh.tensor.issue.checks import explain_data_dependent
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE

_LEAF: Final = pytree.tree_structure(0)


def issue_asking(
    func: Any, described: list[Any], key: tuple[Any, ...], operands: Sequence[Any], team: Team, *, is_global: bool
) -> Any:
    """Run an operator like `nonzero`, and wait until the ranks have said what metadata its results have.

    Args:
        func: The operator.
        described: Its name and arguments, for the ranks.
        key: What these depend on.
        operands: Of the command.
        team: The ranks.
        is_global: Whether the arguments are parts of one tensor.

    Raises:
        TypeError: It returns something else than new tensors, or they differ in shape between the ranks.
        MeshErrorGroup: It has failed; see `answers_now` for the others.
    """
    returns = func._schema.returns
    if any(str(one.type) != "Tensor" or one.alias_info is not None for one in returns):
        raise explain_data_dependent(func)
    shapes = team.engine.shapes
    unknown = shapes.meta((0,), (1,), torch.float32, team.engine.device, is_global=is_global)
    plan = shapes.plans.get(("asking", *key))
    if plan is None:
        outs = list(range(len(returns)))
        number = FIRST_SIGNATURE + shapes.new_number()
        metas, leaves = [unknown] * len(outs), [FRESH] * len(outs)
        plan = Plan(number, func.name(), [*described, outs, []], metas, leaves, [False] * len(outs), _LEAF)
        shapes.remember(("asking", *key), plan)
    first = team.emit(plan, operands, len(returns))
    made = [make(unknown, team, first + index) for index in range(len(returns))]
    places = range(len(team.peers))
    request = team.engine.ask(
        team, places, lambda number: call_kernel(team, "metadata", number, *made), metas_of(len(made))
    )
    found = answers_now(request)
    if any(found[place] != found[0] for place in places):
        sizes = ", ".join(str([tuple(size) for size, *_ in found[place]]) for place in places[:8])
        raise explain_data_dependent(func, f"of sizes {sizes}")
    results: list[torch.Tensor] = []
    for tensor, (size, stride, dtype) in zip(made, found[0], strict=True):
        meta = shapes.meta(size, stride, getattr(torch, dtype), team.engine.device, is_global=is_global)
        results.append(make_held(meta, tensor._held))
    return results[0] if len(results) == 1 else tuple(results)
