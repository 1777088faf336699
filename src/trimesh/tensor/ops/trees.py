"""`to_mesh` and `slice_mesh` of whole trees of tensors."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.ops import movement

T = TypeVar("T")


def to_mesh(tree: T, target: ProcMesh) -> T:
    """Return copies on other ranks of all tensors of a tree: `t.to_mesh(target)` of each, in order.

    Args:
        tree: A tensor on a mesh, or any nesting of lists, tuples and dicts with some; anything else in it stays.
        target: The ranks.

    Raises:
        ShapeError: The ranks do not fit those of a tensor.
        TypeError: A tensor is of this process.

    Blocking: no checkpoint; see `MeshTensor.to_mesh`.
    """
    moved: T = pytree.tree_map_only(torch.Tensor, lambda one: movement.to_mesh(one, target), tree)
    return moved


def slice_mesh(tree: T, **selection: int | slice) -> T:
    """Return all tensors of a tree as a part of their ranks has them: `t.slice_mesh(...)` of each.

    Args:
        tree: See `to_mesh`; with a tensor on each rank.
        **selection: Index or slice by label.

    Raises:
        ShapeError: The ranks have no such part.
        TypeError: A tensor is of this process, or a global one.

    Blocking: no checkpoint; nothing moves.
    """
    sliced: T = pytree.tree_map_only(torch.Tensor, lambda one: movement.slice_mesh(one, **selection), tree)
    return sliced
