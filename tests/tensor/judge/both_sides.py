"""What programs call that is one thing on plain tensors and another on a mesh: tensors that move, and are looked at.

Each is a pair: what it comes to on one tensor, and the way by the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.tensor.judge.program import Extent

import trimesh

Names = dict[str, Callable[..., Any]]


class Cubed(torch.autograd.Function):
    """A function with a derivative of its own, and one of that."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value * value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [value] = ctx.saved_tensors
        return 3 * value * value * grads[0]


def autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where products are of bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*args)


def plain_names(extent: Extent) -> Names:
    """Return what programs call on plain tensors."""

    def copied(value: torch.Tensor, *_: Any) -> torch.Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    return {
        "cubed": Cubed.apply,  # type: ignore[dict-item]
        "autocast": autocast,
        "through": torch.clone,
        "rejoined": torch.clone,
        "doubled": lambda value: value.mul_(2).detach(),  # a function returns a tensor of its own on the same memory
        "reduced": lambda value, label: copied(value) * dict(extent)[label],
        "spread": copied,
        "moved": copied,
        "laid": copied,
    }


@trimesh.remote
def through(value: Any) -> Any:
    """Copy a tensor on the ranks, where it is a `DTensor`."""
    return value.clone()


@trimesh.remote(propagate=torch.clone)
def rejoined(value: Any) -> Any:
    """Take a `DTensor` apart, and join the parts."""
    from torch.distributed.tensor import DTensor

    local = value.to_local().clone()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, shape=value.size(), stride=value.stride(), run_check=False
    )


@trimesh.remote(propagate=lambda value: value)
def doubled(value: Any) -> Any:
    """Write to a tensor on the ranks, by torch's own rules."""
    return value.mul_(2)


def mesh_names(procs: Any) -> Names:
    """Return what programs call on tensors of a mesh."""

    def own(value: Any) -> Any:
        return trimesh.redistribute(value, None).local([None] * value.ndim)

    def reduced(value: Any, label: str) -> Any:
        tree = {"here": own(value), "others": [own(value)]}
        out = torch.empty_like(tree["here"])  # type: ignore[call-overload]
        tree["here"].reduce(label, "sum", out=out)  # type: ignore[attr-defined]
        [other] = trimesh.reduce(tree, label)["others"]
        return ((out + other) / 2).to_global()  # the same twice, in whatever way

    def laid(value: Any, cuts: Sequence[Any]) -> Any:
        return trimesh.redistribute(value, list(cuts))

    return {
        "cubed": Cubed.apply,  # type: ignore[dict-item]
        "autocast": autocast,
        "through": through,
        "rejoined": rejoined,
        "doubled": doubled,
        "reduced": reduced,
        "spread": lambda value, label: trimesh.tensor.broadcast(own(value), label, 0).to_global(),
        "moved": lambda value: trimesh.tensor.to_mesh({"tree": [value]}, procs)["tree"][0],
        "laid": laid,
    }
