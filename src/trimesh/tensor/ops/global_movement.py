"""Global tensors from one mesh to another: every rank there reads, of the parts here, what it needs."""

from __future__ import annotations

from typing import Any

import torch

from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes
from trimesh.tensor.ops.global_tensor import checked_team, global_meta
from trimesh.tensor.protocol.placement import WHOLE


def global_to_mesh(tensor: MeshTensor, target: Team) -> MeshTensor:
    """Return a global tensor on other ranks; see `MeshTensor.to_mesh`.

    Raises:
        ShapeError: Some ranks of the target are missing in their extent.
        RuntimeError: The processes are simulated.
    """
    checked_team(target)
    if torch.is_grad_enabled() and tensor.requires_grad:
        apply: Any = _MoveParts.apply
        made: MeshTensor = apply(tensor, target, None)
        return made
    return _moved(tensor, target, None)[0]


def _moved(tensor: MeshTensor, target: Team, like: MeshTensor | None) -> tuple[MeshTensor, MeshTensor]:
    """Move a tensor; return it, and how it lay.

    Args:
        tensor: What moves.
        target: The ranks.
        like: How another one lay, which it is to lie as; None to be cut along the labels that the target has, too.
    """
    source = tensor._held.team
    engine = source.engine
    ids = [[peer.proc_id for peer in team.peers] for team in (source, target)]
    if engine.has_values and engine.proc.is_simulated and set(ids[0]) != set(ids[1]):
        raise RuntimeError("tensors of a simulated mesh cannot move to other processes: use real ones for this test")
    nothing = engine.shapes.meta((0,), (1,), torch.uint8, tensor.device)
    meta = global_meta(target, tensor._meta.size, tensor.dtype)
    labels = list(source.region.extent)
    same = Sizes(labels.index(label) if label in labels else WHOLE for label in target.region.extent)
    move = engine.shapes.new_number()
    [layout] = call_kernel(source, "send_parts", tensor, move, Sizes(ids[1]), outputs=[nothing])
    # The target may be waited for without anything else being sent: what it waits for must be under way.
    engine.flush_team(source)
    layouts = [] if like is None else [like]
    [made] = call_kernel(
        target, "receive_parts", move, Sizes(ids[0]), same, meta.dtype, Sizes(meta.size), layouts, outputs=[meta]
    )
    return made, layout


class _MoveParts(torch.autograd.Function):
    """The gradient moves back, and lies there as the tensor that it is of."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, target: Team, like: MeshTensor | None) -> MeshTensor:
        ctx.source = tensor._held.team
        made, ctx.layout = _moved(tensor, target, like)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        apply: Any = _MoveParts.apply
        return apply(grad, ctx.source, ctx.layout), None, None
