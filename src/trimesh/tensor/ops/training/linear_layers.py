"""Linear layers of modules whose inputs are cut along the sequence: one operator, that leaves it as it is."""

from __future__ import annotations

from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol import layers

_torch: Final[Any] = torch._C


def keep_dimensions(module: nn.Module) -> None:
    """Let the linear layers of a module compute without folding dimensions of their inputs into one."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            vars(part)["forward"] = MethodType(_forward, part)


def _forward(layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if not _is_ours(value, weight):
        return nn.functional.linear(value, weight, bias)
    apply: Any = _Linear.apply
    made: torch.Tensor = apply(value, weight, bias)
    return made


def _is_ours(value: Any, weight: Any) -> bool:
    return (
        isinstance(value, MeshTensor)
        and isinstance(weight, MeshTensor)
        and value._meta.is_global
        and value.ndim > 2
        and value.dtype is weight.dtype  # else torch raises
        and value.size(-1) == weight.size(-1)
        and not torch.is_autocast_enabled(value.device.type)
        and _torch._functorch.peek_interpreter_stack() is None
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        made: torch.Tensor = layers.linear(value, weight, bias)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        [grad] = grads
        value, weight = ctx.saved_tensors
        of_value, of_weight, of_bias = ctx.needs_input_grad
        linear: Any = _Linear.apply
        gradient: Any = _WeightGradient.apply
        return (
            linear(grad, weight.t(), None) if of_value else None,
            gradient(grad, value) if of_weight else None,
            grad.sum(tuple(range(grad.ndim - 1))) if of_bias else None,
        )


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad, value)
        made: torch.Tensor = layers.linear_weight_gradient(grad, value)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        [own] = grads
        grad, value = ctx.saved_tensors
        linear: Any = _Linear.apply
        return linear(value, own, None), linear(grad, own.t(), None)
