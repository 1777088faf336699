"""Global tensors laid out anew along one dimension of the mesh: the exchanges of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh.tensor.dtensor.sharding import assemble
from trimesh.tensor.kernels.global_tensors import detached, refreshed
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@attrs.frozen
class KeptAlong:
    """How a tensor lay along a label before it was moved, kept for its gradient."""

    along: int
    dim: int


def move_along(rank: Rank, team: TeamOnRank, value: DTensor, where: tuple[int, ...]) -> tuple[Any, KeptAlong]:
    """Cut a tensor along a label where it is to be cut; return how it lay there, too."""
    along, dim = where
    placement = value.placements[along]
    kept = KeptAlong(along, getattr(placement, "dim", WHOLE) if placement.is_shard() else WHOLE)
    return _moved(refreshed(rank, value), along, dim), kept


def move_along_back(rank: Rank, team: TeamOnRank, value: DTensor, layout: KeptAlong) -> DTensor:
    """Cut a gradient along a label as what it is of."""
    return _moved(refreshed(rank, value), layout.along, layout.dim)


def _moved(value: DTensor, along: int, dim: int) -> DTensor:
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see `placements_by_label`

    target = Replicate() if dim == WHOLE else Shard(dim)
    before = value.placements[along]
    placements = [*value.placements[:along], target, *value.placements[along + 1 :]]
    if isinstance(before, Shard) and isinstance(target, Shard) and before.dim != dim:
        turned = _turned(value, along, before.dim, dim)
        if turned is not None:
            return assemble(turned, value.device_mesh, placements, torch.empty(value.size(), device="meta"))
    return detached(value, value.redistribute(placements=placements))


def _turned(value: DTensor, along: int, gathered: int, cut: int) -> torch.Tensor | None:
    """Return this rank's part after each has sent each its own; None where parts are not equal.

    Torch's own way, on the host, is to bring all of it together everywhere.
    """
    mesh, local = value.device_mesh, value._local_tensor
    ranks = mesh.size(along)
    pieces = {gathered: ranks, cut: ranks}
    for dim, one in enumerate(value.placements):
        if dim != along and one.is_shard():
            at = one.dim  # type: ignore[attr-defined]
            if at in pieces:
                if dim > along:  # what is cut along it is cut inside of what is cut along this
                    return None
                pieces[at] *= mesh.size(dim)
    if any(value.size(dim) % count for dim, count in pieces.items()):
        return None
    sent = torch.stack(local.chunk(ranks, cut))
    sizes = [1] * ranks
    ops = torch.ops._c10d_functional
    group = mesh.get_group(along).group_name
    come: torch.Tensor = ops.wait_tensor(ops.all_to_all_single(sent, sizes, sizes, group))
    return torch.cat(come.unbind(), gathered)


KERNELS: Final = (Kernel("move_along", move_along), Kernel("move_along_back", move_along_back))
