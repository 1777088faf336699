"""What a plan does to activations on a mesh: hooks around modules that lay them out anew along one label."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import nn

from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes
from trimesh.tensor.ops.global_tensor import global_meta
from trimesh.tensor.parallel.exchanges import Exchange


class Exchanging:
    """The exchanges of one module that was moved by a plan."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return one that has brought nothing together yet: a module is copied with its hooks."""
        return type(self)()

    def follow(self, part: nn.Module, exchanges: list[Exchange]) -> None:
        """Do exchanges whenever a module runs."""
        hooks = _Hooks(self, exchanges)
        if any(one.side == "input" for one in exchanges):
            part.register_forward_pre_hook(hooks.before)
        if any(one.side == "output" for one in exchanges):
            part.register_forward_hook(hooks.after)

    def moved(self, one: Exchange, value: Any) -> Any:
        """Return a tensor as it is to be along the label; anything else as it is."""
        if not isinstance(value, MeshTensor) or not value._meta.is_global or not one.is_for(value):
            return value
        along = list(value._held.team.region.extent).index(one.label)
        if one.kind != "gather" or value.grad_fn is None or not torch.is_grad_enabled():
            if one.kind == "scatter":
                self._last = None
            return _moved(value, along, one.dim)
        # Modules side by side (queries, keys, values) share what is brought together, and its gradient goes back once.
        # Only of what was computed for this pass: whoever writes to such a tensor changes its version.
        last = self._last
        if last is not None and last[0]() is value and last[1:3] == (value._version, along):
            return last[3]
        made = _moved(value, along, one.dim)
        self._last = weakref.ref(value), value._version, along, made
        return made


class _Hooks:
    """Those of one module."""

    def __init__(self, exchanging: Exchanging, exchanges: list[Exchange]) -> None:
        self._exchanging = exchanging
        self._exchanges = exchanges

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for one in self._exchanges:
            if one.side == "input":
                args = tuple(self._exchanging.moved(one, value) for value in args)
        return args

    def after(self, _: nn.Module, _args: Any, made: Any) -> Any:
        for one in self._exchanges:
            if one.side == "output":
                made = self._exchanging.moved(one, made)
        return made


def exchange_around(module: nn.Module, exchanges: tuple[Exchange, ...]) -> None:
    """Do the exchanges of a plan whenever the modules run that they are for."""
    exchanging = Exchanging()
    for name, part in module.named_modules():
        found = [one for one in exchanges if one.fits(name, part)]
        if found:
            exchanging.follow(part, found)


def _moved(value: MeshTensor, along: int, dim: int) -> torch.Tensor:
    apply: Any = _Move.apply
    made: torch.Tensor = apply(value, along, dim)
    return made


class _Move(torch.autograd.Function):
    """The gradient lies, along the label, as the tensor that it is of."""

    @staticmethod
    def forward(ctx: Any, value: MeshTensor, along: int, dim: int) -> torch.Tensor:
        team = value._held.team
        nothing = team.engine.shapes.meta((0,), (1,), torch.uint8, value.device)
        meta = global_meta(team, value._meta.size, value.dtype)
        made, ctx.layout = call_kernel(team, "move_along", value, Sizes((along, dim)), outputs=[meta, nothing])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        [grad] = grads
        meta = global_meta(grad._held.team, grad._meta.size, grad.dtype)
        [made] = call_kernel(grad._held.team, "move_along_back", grad, ctx.layout, outputs=[meta])
        return made, None, None
