"""Global tensors in functions of the user's, where they are torch's `DTensor`s, and what these functions make of them.

Inside a function torch's own rules of sharding hold. What comes out is looked at: the rules of ours believe what a
tensor says of itself.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trimesh.tensor.dtensor.copied_view import copied_views
from trimesh.tensor.rank.layout import laid_out
from trimesh.tensor.rank.rank import Rank
from trimesh.tensor.rules.arguments import is_global
from trimesh.tensor.rules.assembly import made_of
from trimesh.tensor.rules.cuts import cuts_of, dense_strides, local_part
from trimesh.tensor.rules.sums import lies_so

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contextmanager
def lent_to_function(rank: Rank, tensors: Iterable[Any]) -> Generator[None]:
    """Let a function read and write global tensors in a block: they are what they are views of, before and after."""
    views = copied_views(rank)
    found = [one for one in tensors if is_global(one)] if views else []
    for one in found:
        views.refresh(one)
    yield
    for one in found:  # it may have written to it
        views.written(one)


def adopted(name: str, value: DTensor, mesh: Any, stride: Sequence[int] = ()) -> DTensor:
    """Return a distributed tensor of a function's as a global tensor, on the same memory where that lies as it should.

    Args:
        name: Of the function.
        value: What it has made, without history.
        mesh: The device mesh of the ranks that it ran on.
        stride: How the whole is to lie; nothing for as it does.

    Raises:
        TypeError: There is no global tensor that lies so.
    """

    def refused(rule: str, found: object, instead: str) -> TypeError:
        return TypeError(f"a DTensor that {name} returns must be {rule}, got {found}: {instead}")

    if value.device_mesh != mesh:
        raise refused(
            f"on the device mesh of the ranks that it runs on, {mesh}",
            value.device_mesh,
            "take `procs.device_mesh()` as an argument and make it on that",
        )
    try:
        cuts = cuts_of(value.placements)
    except NotImplementedError:
        raise refused(
            "cut, whole, or in parts of a sum along each dimension of the mesh",
            value.placements,
            "write t.redistribute(placements=[...]) by Shard, Replicate and Partial()",
        ) from None
    local: Any = value._local_tensor
    if hasattr(local, "wait"):  # of a collective that torch has left under way
        local = local.wait()
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    _, expected = local_part(value.size(), cuts, sizes, mesh.get_coordinate() or ())
    if list(local.size()) != expected:
        raise refused(
            f"cut as torch.chunk cuts, {expected} of {list(value.size())} on this rank",
            list(local.size()),
            "write DTensor.from_local(..., shape=..., stride=...) of such parts, or distribute_tensor",
        )
    strides = dense_strides(local.size(), value.size(), value.stride())
    if strides is not None and not lies_so(local, strides):
        local = torch.empty_strided(local.size(), strides, dtype=local.dtype, device=local.device).copy_(local)
    if local is not value._local_tensor or value.device_mesh is not mesh:
        value = made_of(local, mesh, value.placements, value)
    made: DTensor = laid_out(value, stride)
    return made
