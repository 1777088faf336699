"""Issue a kernel of ours, as `issue` does an operator of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from trimesh.tensor.controller.changed_bases import check_views, has_changed_bases
from trimesh.tensor.controller.compiling import check_not_compiled
from trimesh.tensor.controller.plan import FRESH, Meta, Plan
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor, make
from trimesh.tensor.protocol import arguments
from trimesh.tensor.protocol.arguments import BODY_SLOT, NUMBER_SLOT, SLOT
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE

_LEAF = pytree.tree_structure(0)


def call_kernel(
    team: Team, name: str, *args: Any, outputs: Sequence[Meta] = (), writes: Sequence[int] = ()
) -> list[MeshTensor]:
    """Run a kernel on every rank of a team.

    Args:
        team: The ranks.
        name: Of the kernel.
        args: Mesh tensors of the team, in lists and tuples if need be; memoryviews, which go as bodies; and data.
            Whole numbers vary from command to command.
        outputs: Metadata of what it returns.
        writes: Places, among the tensors, bodies and numbers of `args`, of tensors that it changes.

    Returns:
        The new tensors.
    """
    check_not_compiled()
    if outputs and has_changed_bases():  # also with gradients off: so our differentiable functions call this
        check_views(name, [one for one in pytree.tree_leaves(args) if type(one) is MeshTensor])
    operands: list[Any] = []
    key: list[Any] = [name]

    def slot(value: Any) -> Any:
        kind = type(value)
        if kind is MeshTensor:
            operands.append(value._held.ref)
            key.append(MeshTensor)
            return SLOT
        if kind is memoryview:
            operands.append(team.add_body(value))
            key.append(memoryview)
            return BODY_SLOT
        if kind is int:
            operands.append(value)
            key.append(int)
            return NUMBER_SLOT
        if kind is list or kind is tuple:
            key.extend((kind, len(value)))
            return kind([slot(item) for item in value])
        key.extend((kind, value))
        return value

    described = [slot(value) for value in args]
    shapes = team.engine.shapes
    key += (tuple(outputs), tuple(writes))
    plan = shapes.plans.get(tuple(key))
    if plan is None:
        description = [
            f"trimesh::{name}", arguments.describe(described), ["d"], list(range(len(outputs))) or [-1], list(writes)
        ]  # fmt: skip
        number = FIRST_SIGNATURE + shapes.new_number()
        leaves = [FRESH] * len(outputs)
        plan = Plan(number, name, description, outputs, leaves, [False] * len(outputs), _LEAF)
        shapes.remember(tuple(key), plan)
    first = team.emit(plan, operands, len(outputs))
    return [make(meta, team, first + index) for index, meta in enumerate(outputs)]
