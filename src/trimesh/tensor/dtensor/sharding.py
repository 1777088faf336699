"""Sharding of global tensors on the ranks, as torch's `DTensor`s: parts, boxes and placements."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh.tensor.dtensor.copied_view import copied_views
from trimesh.tensor.protocol.placement import WHOLE, Box
from trimesh.tensor.rank.kernel import laid_out
from trimesh.tensor.rank.rank import Rank
from trimesh.tensor.rules.call import is_global, made_of
from trimesh.tensor.rules.cuts import cuts_of, dense_strides, local_part
from trimesh.tensor.rules.sums import lies_so

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


_CHATTY: Final = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor._redistribute")
"""Loggers that warn of all-to-all, missing in gloo, and of gathers along two dimensions: users cannot avoid either."""


@attrs.frozen
class KeptPlacements:
    """Placements of a tensor before `redistribute`, kept for its gradient."""

    placements: tuple[Placement, ...]


def placements_by_label(cuts: Sequence[int]) -> list[Placement]:
    # Torch takes 0.7 s to import this: only ranks that have global tensors pay for it.
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return [Replicate() if cut == WHOLE else Shard(cut) for cut in cuts] or [Replicate()]


def assemble(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> DTensor:
    """Return a global tensor with this rank's part and the metadata of `whole`."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.size(), stride=whole.stride())


def unsummed(placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements with partial ones replaced by replicated ones."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    return [Replicate() if one.is_partial() else one for one in placements]


def boxed(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements under which every rank has one box: all but plain `Shard` placements become replicated."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    return [one if type(one) is Shard else Replicate() for one in placements]


def box_by_placements(size: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Box:
    """Return this rank's box of a tensor of some size, under placements that are `boxed`."""
    box = Box.of_all(size)
    for dim, (placement, index) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if placement.is_shard():
            box = box.cut(placement.dim % max(1, len(box.size)), mesh.size(dim), index)
    return box


def part_on_rank(value: DTensor) -> tuple[Box, torch.Tensor, DTensor]:
    """Return this rank's box of a global tensor, the part in it, and the tensor under `boxed` placements.

    All ranks take part: partial sums are reduced, and other placements are gathered.
    """
    placements = boxed(value.placements)
    found: Any = value if list(value.placements) == placements else value.redistribute(placements=placements)
    box, local = box_by_placements(found.size(), found.device_mesh, placements), found._local_tensor
    if tuple(local.size()) != box.size:
        raise RuntimeError(
            f"a part of {tuple(found.size())} by {placements} must have size {box.size}, got {tuple(local.size())}"
        )
    return box, local, found


def is_first_replica(value: DTensor) -> bool:
    """Return whether this rank is the first of the replicas of its part."""
    mesh: Any = value.device_mesh
    places = zip(value.placements, mesh.get_coordinate(), strict=True)
    return all(index == 0 for placement, index in places if not placement.is_shard())


# ---- own dtensors ----------------------------------------------------------------------------------------------------

# Global tensors in user functions, where they are torch's `DTensor`s, and the results of these functions.
#
# Inside a function torch's own sharding rules apply. Results are checked, because `rules` trusts the spec of a tensor.


@contextmanager
def lent_to_function(rank: Rank, tensors: Iterable[Any]) -> Generator[None]:
    """Let a user function read and write global tensors in a block: copied views are updated before and after it."""
    views = copied_views(rank)
    found = [one for one in tensors if is_global(one)] if views else []
    for one in found:
        views.refresh(one)
    yield
    for one in found:  # the function may have written to it
        views.written(one)


def adopted(name: str, value: DTensor, mesh: Any, stride: Sequence[int] = ()) -> DTensor:
    """Return the `DTensor` of a user function as a global tensor, on the same memory if its strides fit.

    Args:
        name: Name of the function.
        value: Its result, detached.
        mesh: The device mesh of the ranks that it ran on.
        stride: Required strides of the whole tensor; empty to keep its own.

    Raises:
        TypeError: Global tensors do not support its placements or its mesh.
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
            "sharded, replicated or partial (a sum) along each dimension of the mesh",
            value.placements,
            "write t.redistribute(placements=[...]) by Shard, Replicate and Partial()",
        ) from None
    local: Any = value._local_tensor
    if hasattr(local, "wait"):  # result of an asynchronous collective
        local = local.wait()
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    _, expected = local_part(value.size(), cuts, sizes, mesh.get_coordinate())
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
