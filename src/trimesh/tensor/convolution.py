"""Convolutions of global tensors: batches may be cut, everything else is whole on every rank.

Torch's own cuts pictures, too, exchanges their borders, and refuses a batch that is cut along two dimensions of the
mesh (2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trimesh.tensor.rank import Rank, TeamOnRank
from trimesh.tensor.sharding import assemble

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def convolution(_rank: Rank, _team: TeamOnRank, value: DTensor, *args: Any) -> Any:
    """Return the result, cut as the batch is."""
    batch = _batch_cuts(value)
    local = _laid_out(value, batch)
    weight, bias = (None if one is None else one.full_tensor() for one in args[:2])
    made = torch.ops.aten.convolution.default(local, weight, bias, *args[2:])
    return _assembled(made, value, batch)


def convolution_backward(_rank: Rank, _team: TeamOnRank, grad: DTensor, value: DTensor, *args: Any) -> Sequence[Any]:
    """Return the gradients; those of weight and bias are sums of parts, one for each part of the batch."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: PLC0415 - see `sharding`

    batch = _batch_cuts(value)
    weight = args[0].full_tensor()
    found = torch.ops.aten.convolution_backward.default(
        _laid_out(grad, batch), _laid_out(value, batch), weight, *args[1:]
    )
    sums = [Partial() if one.is_shard() else Replicate() for one in batch]
    mesh = value.device_mesh
    made = [None if one is None else DTensor.from_local(one, mesh, sums, run_check=False) for one in found[1:]]
    return [None if found[0] is None else _assembled(found[0], value, batch), *made]


def _batch_cuts(value: DTensor) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see `sharding`

    return [one if one == Shard(0) else Replicate() for one in value.placements]


def _laid_out(value: DTensor, placements: Sequence[Any]) -> torch.Tensor:
    return value.redistribute(placements=placements).to_local()


def _assembled(local: torch.Tensor, value: DTensor, placements: Sequence[Any]) -> DTensor:
    looks = torch.empty((value.size(0), *local.size()[1:]), device="meta")
    return assemble(local, value.device_mesh, placements, looks)
