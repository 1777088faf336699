"""Partial sums of one rank: reduced in place, in a tensor and all others that share its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import memory_of
from trimesh.tensor.rules.cuts import (
    SUM,
    Cuts,
    added_up,
    all_reduced,
    all_summed,
    cuts_of,
    dense_strides,
    placements_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Sums:
    """Partial tensors of a rank, grouped by shared memory.

    SU-1 All global tensors that share memory are partial along the same dimensions of the mesh: views keep the sums
    partial, and a reduction reaches all of them.

    Attributes:
        on_laid: Called with each tensor whose placements change, and its former part.
    """

    __slots__ = ("_sharing", "on_laid")

    def __init__(self) -> None:
        self.on_laid: Callable[[DTensor, torch.Tensor], None] | None = None
        self._sharing: dict[int, list[weakref.ref[Any]]] = {}

    def viewed(self, base: DTensor, results: Sequence[DTensor]) -> None:
        """Record views of a partial tensor. They share its memory, or that of a resharded copy made for the view."""
        if not results:
            return
        memory = memory_of(results[0])
        assert memory is not None
        if len(self._sharing) > 256:
            self._sharing = {key: kept for key, kept in self._sharing.items() if any(one() is not None for one in kept)}
        kept = [
            one for one in self._sharing.get(memory, ()) if (alive := one()) is not None and memory_of(alive) == memory
        ]
        news = [base, *results] if memory_of(base) == memory else results
        self._sharing[memory] = [*kept, *map(weakref.ref, news)]

    def settle(self, value: DTensor, wanted: Cuts) -> None:
        """Reduce the partial sums of a tensor, in place: its placements change, its values do not. Collective.

        Args:
            value: The partial tensor.
            wanted: Its new placements, if no other partial tensor shares its memory. Otherwise its whole memory is
                all-reduced, and it and the others become replicated where they were partial.
        """
        memory, sharing = self._sharers(value)
        if len(sharing) == 1:
            cuts = cuts_of(value.placements)
            cuts = tuple(want if cut == SUM else cut for cut, want in zip(cuts, wanted, strict=True))
            self._lay(value, moved(value, cuts), cuts)
            return
        assert memory is not None
        del self._sharing[memory]
        local = value._local_tensor
        flat = local.as_strided([local.untyped_storage().nbytes() // local.itemsize], [1], 0)
        for dim, cut in enumerate(cuts_of(value.placements)):
            if cut == SUM:
                flat.copy_(all_reduced(flat, "sum", value.device_mesh, dim))
        for one in sharing.values():
            self._lay(one, one._local_tensor, added_up(cuts_of(one.placements)))

    def settle_together(self, values: Sequence[DTensor]) -> None:
        """Reduce several partial tensors in few collectives; skip tensors that share memory with other partial ones.

        Args:
            values: Tensors of one device mesh, with any placements. Those with several partial dimensions, or alone in
                dtype and dimension, stay partial.
        """
        alike: dict[tuple[int, torch.dtype], dict[int, DTensor]] = {}
        for value in values:
            cuts = cuts_of(value.placements)
            if cuts.count(SUM) == 1 and not self.is_shared(value):
                alike.setdefault((cuts.index(SUM), value.dtype), {})[id(value)] = value
        for (dim, _), some in alike.items():
            if len(some) == 1:
                continue
            found = list(some.values())
            sums = all_summed([one._local_tensor for one in found], found[0].device_mesh, dim)
            for value, local in zip(found, sums, strict=True):
                self._lay(value, ordered(local, value.size(), value.stride()), added_up(cuts_of(value.placements)))

    def is_shared(self, value: Any) -> bool:
        """Return whether other partial tensors share the memory of one."""
        return bool(self._sharing) and len(self._sharers(value)[1]) > 1

    def _lay(self, value: DTensor, local: torch.Tensor, cuts: Cuts) -> None:
        before = value._local_tensor
        value._local_tensor, value._spec = local, respecified(value, cuts)
        if self.on_laid is not None:
            self.on_laid(value, before)

    def _sharers(self, value: DTensor) -> tuple[int | None, dict[int, DTensor]]:
        """Return the memory of a partial tensor, and by identity all tensors that share it, itself included."""
        memory = memory_of(value)
        sharing = {id(value): value}
        for ref in self._sharing.get(memory, ()) if memory is not None else ():
            one = ref()
            if one is not None and memory_of(one) == memory:
                sharing[id(one)] = one
        return memory, sharing


def respecified(value: DTensor, cuts: Cuts) -> Any:
    """Return the `DTensorSpec` of a tensor with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec  # noqa: PLC0415 - see `sharding`

    return DTensorSpec(value.device_mesh, placements_of(cuts), tensor_meta=value._spec.tensor_meta)


def moved(value: DTensor, cuts: Cuts) -> torch.Tensor:
    """Return this rank's part of a tensor under other placements, with the dimension order of the whole in memory."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor  # noqa: PLC0415 - see `sharding`

    own = cuts_of(value.placements)
    if cuts == own:
        return ordered(value._local_tensor, value.size(), value.stride())
    added = [dim for dim, (cut, was) in enumerate(zip(cuts, own, strict=True)) if cut == SUM != was]
    if added:  # torch would divide the tensor by the number of ranks, which fails for integers
        whole = moved(value, tuple(WHOLE if dim in added else cut for dim, cut in enumerate(cuts)))
        place = value.device_mesh.get_coordinate()
        assert place is not None, "this rank is in the mesh"
        return whole if all(place[dim] == 0 for dim in added) else torch.zeros_like(whole)
    # `DTensor.redistribute` of torch 2.9 refuses partial sums that stay partial.
    with torch.no_grad():
        local = redistribute_local_tensor(value._local_tensor, value._spec, respecified(value, cuts))
    return ordered(local, value.size(), value.stride())


def ordered(local: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a part with the dimension order of its whole in memory; copies if necessary."""
    wanted = dense_strides(local.size(), size, stride)
    if wanted is None or lies_so(local, wanted):
        return local
    made = torch.empty_strided(local.size(), wanted, dtype=local.dtype, device=local.device)
    return made.copy_(local)


def lies_so(local: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides, apart from dimensions of length 0 or 1."""
    found = local.stride()
    return found == strides or all(
        length <= 1 or one == other for length, one, other in zip(local.size(), found, strides, strict=True)
    )
