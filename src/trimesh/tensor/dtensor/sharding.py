"""How global tensors lie on the ranks, where they are `DTensor`s of torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.placement import WHOLE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


_CHATTY: Final = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor._redistribute")
"""What warns that gloo has no all-to-all, and that a gather along two dimensions takes two: users cannot change it."""


def placements_by_label(cuts: Sequence[int]) -> list[Placement]:
    # Torch takes 0.7 s to import this: only ranks that have global tensors pay for it.
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return [Replicate() if cut == WHOLE else Shard(cut) for cut in cuts] or [Replicate()]


def assemble(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> DTensor:
    """Return the global tensor with the metadata of `whole` of which this rank has a part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.size(), stride=whole.stride())


def unsummed(placements: Sequence[Placement]) -> list[Placement]:
    """Return the same placements with all that is partial replicated."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    return [Replicate() if one.is_partial() else one for one in placements]


def boxed(placements: Sequence[Placement]) -> list[Placement]:
    """Return the nearest placements by which every rank has one box: what is not plainly cut is replicated."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    return [one if type(one) is Shard else Replicate() for one in placements]


def box_by_placements(size: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Box:
    """Return the part of a tensor of some size that this rank has, by placements that are `boxed`."""
    box = Box.of_all(size)
    for dim, (placement, index) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if placement.is_shard():
            box = box.cut(placement.dim % max(1, len(box.size)), mesh.size(dim), index)
    return box


def part_on_rank(value: DTensor) -> tuple[Box, torch.Tensor, DTensor]:
    """Return which part of a global tensor this rank has, that part, and the tensor as it lies then.

    All ranks take part: what is partial is added up, and what is not plainly cut is gathered.
    """
    placements = boxed(value.placements)
    found: Any = value if list(value.placements) == placements else value.redistribute(placements=placements)
    box, local = box_by_placements(found.size(), found.device_mesh, placements), found._local_tensor
    if tuple(local.size()) != box.size:
        raise RuntimeError(f"a part of {tuple(found.size())} by {placements} has {tuple(local.size())}, not {box.size}")
    return box, local, found


def is_first_replica(value: DTensor) -> bool:
    """Whether this rank is the first of those that have the same part."""
    places = zip(value.placements, value.device_mesh.get_coordinate() or (), strict=True)
    return all(index == 0 for placement, index in places if not placement.is_shard())
