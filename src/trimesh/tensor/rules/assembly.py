"""Global tensors put together of the parts that the ranks have, and parts taken of what is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.protocol.tracing import traced
from trimesh.tensor.rank.layout import global_tensor
from trimesh.tensor.rules.arguments import is_global, replaced
from trimesh.tensor.rules.call import GlobalMeta
from trimesh.tensor.rules.cuts import Cuts, local_part, part_of, placements_of
from trimesh.tensor.rules.sums import lies_so, ordered

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor


def spec_of(mesh: Any, cuts: Cuts, meta: GlobalMeta) -> Any:
    """Return what torch is to know of a global tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    known = TensorMeta(torch.Size(meta.size), meta.stride, meta.dtype)
    return DTensorSpec(mesh, placements_of(cuts), tensor_meta=known)


def assembled(local: Any, made: Any, leaves: Sequence[DTensor]) -> Any:
    """Return a leaf of a result: see `OperatorWay.made`."""
    if made is None or not isinstance(local, torch.Tensor):
        return local
    if isinstance(made, int):
        return leaves[made]
    spec, size, strides = made
    if local.size() != size or local.dtype is not spec.tensor_meta.dtype:
        raise RuntimeError(
            f"a part of {tuple(spec.shape)} by {spec.placements} must be {tuple(size)} of {spec.tensor_meta.dtype}, "
            f"got {tuple(local.size())} of {local.dtype}: a rule of the table is wrong"
        )
    if strides is not None and not lies_so(local, strides):
        local = torch.empty_strided(size, strides, dtype=local.dtype, device=local.device).copy_(local)
    return global_tensor(local, spec)


def made_of(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> DTensor:
    """Return the global tensor with the metadata of `whole` of which this rank has a part."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.size(), whole.stride(), whole.dtype))
    return global_tensor(local, spec)


def joined(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a tensor that every rank has as a global one."""
    if is_global(value):
        return value
    return made_of(value, like.device_mesh, placements_of((WHOLE,) * len(like.placements)), value)


def own_part(whole: torch.Tensor, like: DTensor, cuts: Cuts) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has."""
    mesh = like.device_mesh
    starts, lengths = local_part(
        whole.size(), cuts, [mesh.size(dim) for dim in range(mesh.ndim)], mesh.get_coordinate() or ()
    )
    if list(whole.size()) == lengths:
        return whole
    part = whole
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length != whole.size(dim):
            part = part.narrow(dim, start, length)
    return ordered(part.clone(), whole.size(), whole.stride())


def sliced_part(value: DTensor, cuts: Cuts, target: Cuts) -> torch.Tensor | None:
    """Return the own part of what is whole so far, if nothing has to be sent for it."""
    local = value._local_tensor
    for dim, (cut, want) in enumerate(zip(cuts, target, strict=True)):
        if cut == want:
            continue
        if cut != WHOLE or want < 0 or want in cuts[dim + 1 :]:
            return None
        mesh = value.device_mesh
        start, length = part_of(local.size(want), mesh.size(dim), mesh.get_local_rank(dim))
        local = local.narrow(want, start, length)
    return local


def metas_made(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[DTensor], fake: FakeTensorMode
) -> tuple[list[GlobalMeta | None], list[int | None]]:
    """Find out what an operator makes; and which of it are arguments, by their numbers."""

    def filled(fakes: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        parts = iter(fakes)
        return replaced(tuple(args), parts), replaced(kwargs, parts)

    result, fakes = traced(
        operator, [(one.size(), one.stride(), one.dtype, one.device) for one in leaves], filled, fake
    )
    metas: list[GlobalMeta | None] = []
    aliases: list[int | None] = []
    for one in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(one, torch.Tensor):
            metas.append(None)
            aliases.append(None)
            continue
        metas.append(GlobalMeta(len(metas), tuple(one.size()), tuple(one.stride()), one.dtype, ()))
        aliases.append(next((index for index, fake in enumerate(fakes) if fake is one), None))
    return metas, aliases
