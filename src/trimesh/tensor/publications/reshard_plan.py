"""Which ranges of which ranks make up what a reader asks for: computed once for two layouts, used for each version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import attrs
import torch

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.state_layout import PartOfState, read_parts

T = TypeVar("T")


@attrs.frozen
class StateParts:
    """What the ranks of a publication have published, as each says it.

    Attributes:
        sizes: By name: the size of the whole tensor.
        by_name: By name: what each rank has of it, in the order of the ranks.
    """

    sizes: Mapping[str, tuple[int, ...]]
    by_name: Mapping[str, Sequence[PartOfState]]

    @property
    def is_whole(self) -> bool:
        """Whether the parts make up each tensor that is one over all ranks."""
        return all(
            sum(one.box.count for one in found if one.is_here) == Box.of_all(found[0].size).count
            for found in self.by_name.values()
            if found[0].is_global
        )


@attrs.frozen
class PlannedRead:
    """One range of one rank.

    Attributes:
        rank: Which.
        offset: Where the range begins in the part of that rank, in elements.
        length: How many elements on it ends, those between that are not wanted included.
        size: Of what is wanted of it.
        strides: How that lies in the range.
        target: Where it belongs in the tensor of the reader.
        has_gaps: Whether it does not lie in one piece, there or here.
    """

    rank: int
    offset: int
    length: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    target: tuple[slice, ...]
    has_gaps: bool


@attrs.frozen
class ReshardPlan:
    """What is to be read for a request.

    Attributes:
        reads: By name.
        dtypes: By name: as it was published.
    """

    reads: Mapping[str, Sequence[PlannedRead]]
    dtypes: Mapping[str, torch.dtype]


class ReshardPlans:
    """The plans of a process that reads publications, by whatever handles; those that were used last are kept.

    Attributes:
        computed: How many were computed.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._parts: OrderedDict[Hashable, StateParts] = OrderedDict()
        self._plans: OrderedDict[Hashable, ReshardPlan] = OrderedDict()

    def parts(self, layouts: tuple[bytes, ...]) -> StateParts:
        """Return what ranks have published.

        Args:
            layouts: What each says of it.

        Raises:
            ProtocolError: They do not say the same of a tensor.
        """
        found = self._parts.get(layouts)
        return _keep(self._parts, layouts, _parts_of(layouts) if found is None else found)

    def plan(self, layouts: tuple[bytes, ...], wanted: Mapping[str, Box]) -> ReshardPlan:
        """Return how to read some boxes of tensors.

        Raises:
            ProtocolError: What the ranks have is not all of one of them.
        """
        key = layouts, tuple((name, box.start, box.size) for name, box in wanted.items())
        found = self._plans.get(key)
        if found is None:
            self.computed += 1
            found = _plan_of(self.parts(layouts), wanted)
        return _keep(self._plans, key, found)


def reshard_plans() -> ReshardPlans:
    """Return the plans of this process.

    Raises:
        RuntimeError: No mesh is open here.
    """
    found = current_proc().above.setdefault(ReshardPlans, ReshardPlans())
    assert isinstance(found, ReshardPlans)
    return found


def _keep(kept: OrderedDict[Hashable, T], key: Hashable, value: T) -> T:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limits.RESHARD_PLANS:
        kept.popitem(last=False)
    return value


def _parts_of(layouts: Sequence[bytes]) -> StateParts:
    by_name: dict[str, list[PartOfState]] = {}
    for layout in layouts:
        for one in read_parts(bytearray(layout)):
            by_name.setdefault(one.name, []).append(one)
    for name, told in by_name.items():
        if len(told) != len(layouts) or any((one.size, one.dtype) != (told[0].size, told[0].dtype) for one in told):
            raise ProtocolError(f"all ranks must publish the same tensor {name!r}, got {told!r:.300}")
    return StateParts({name: found[0].size for name, found in by_name.items()}, by_name)


def _plan_of(parts: StateParts, wanted: Mapping[str, Box]) -> ReshardPlan:
    reads: dict[str, list[PlannedRead]] = {}
    for name, place in wanted.items():
        reads[name] = found = [
            _read_of(rank, one.box, common, place)
            for rank, one in enumerate(parts.by_name[name])
            if one.is_here and (common := one.box.overlap(place)) is not None
        ]
        count = sum(Box.of_all(one.size).count for one in found)
        if count > place.count:
            ranks = [one.rank for one in found]
            raise ProtocolError(
                f"each part of a published tensor must come from one rank, got {name!r} from the ranks {ranks!r:.100}: "
                "of replicas all but one publish it as ShardOf(..., is_first=False)"
            )
        if count != place.count:
            raise ProtocolError(f"the published parts of {name!r} must be all of it: {count} of {place.count} elements")
    return ReshardPlan(reads, {name: dtype_of(parts.by_name[name][0]) for name in wanted})


def _read_of(rank: int, box: Box, common: Box, place: Box) -> PlannedRead:
    offset, length = box.span(common)
    has_gaps = length != common.count or not common.is_whole_in(place)
    return PlannedRead(rank, offset, length, common.size, box.strides(), place.slices(common), has_gaps)


def dtype_of(one: PartOfState) -> torch.dtype:
    """Return the type of a published tensor.

    Raises:
        ProtocolError: It is none of torch.
    """
    found = getattr(torch, one.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"a published tensor must be of a type of torch, got {one.dtype!r}")
    return found
