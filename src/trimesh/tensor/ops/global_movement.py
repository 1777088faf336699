"""Global tensors from one mesh to another: every rank there reads, of the parts here, what it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    return send_global(tensor, target)[0]()


def send_global(
    tensor: MeshTensor, target: Team, like: MeshTensor | None = None, *, waits: bool = True
) -> tuple[Callable[[], MeshTensor], MeshTensor]:
    """Send a tensor; return what lets the target take it, to be called once, and how it lay.

    Args:
        tensor: What moves.
        target: The ranks.
        like: How another one lay, which it is to lie as; None to be cut along the labels that the target has, too.
        waits: Whether ranks of the source wait where much that they have sent was not read yet: where other commands
            come before the target takes it, only if none of these waits for the source.

    Raises:
        RuntimeError: The processes are simulated.
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
    [layout] = call_kernel(source, "send_parts", tensor, move, Sizes(ids[1]), waits, outputs=[nothing])
    # The target may be waited for without anything else being sent: what it waits for must be under way.
    engine.flush_team(source)
    layouts = [] if like is None else [like]
    receive = partial(
        call_kernel, target, "receive_parts", move, Sizes(ids[0]), same, meta.dtype, Sizes(meta.size), layouts,
        outputs=[meta],
    )  # fmt: skip
    return lambda: receive()[0], layout


class _MoveParts(torch.autograd.Function):
    """The gradient moves back, and lies there as the tensor that it is of."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, target: Team, like: MeshTensor | None) -> MeshTensor:
        ctx.source = tensor._held.team
        receive, ctx.layout = send_global(tensor, target, like)
        return receive()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        apply: Any = _MoveParts.apply
        return apply(grad, ctx.source, ctx.layout), None, None
