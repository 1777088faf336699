"""Snapshots: a version of a publication, pinned on all its ranks, and plans to read it in another layout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TypeVar

import attrs
import torch
import trio

from trimesh import limits
from trimesh._native.lib import load
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh._wire.memory import memory_at
from trimesh.errors import ProtocolError
from trimesh.rdma.buffers.buffer import RDMABuffer, mapped
from trimesh.rdma.memory.local import address_of
from trimesh.rdma.publications.board import TensorEntry
from trimesh.rdma.publications.reading import Snapshot
from trimesh.tensor.controller.shapes import ShardOf, shard_of
from trimesh.tensor.protocol.arguments import new_tensor
from trimesh.tensor.protocol.placement import LAYOUT, Box, PartOfState, read_parts

T = TypeVar("T")


@attrs.frozen
class StateParts:
    """Parts of published tensors, as each rank describes them.

    Attributes:
        sizes: Size of each whole tensor, by name.
        by_name: Part of each rank, by name, in the order of the ranks.
    """

    sizes: Mapping[str, tuple[int, ...]]
    by_name: Mapping[str, Sequence[PartOfState]]

    @property
    def is_whole(self) -> bool:
        """Return whether the parts cover each tensor that is sharded over ranks."""
        return all(
            sum(one.box.count for one in found if one.is_here) == Box.of_all(found[0].size).count
            for found in self.by_name.values()
            if found[0].is_global
        )


@attrs.frozen
class PlannedRead:
    """Read of one range of one rank's memory.

    Attributes:
        rank: Index of the rank.
        offset: Start of the range within that rank's part, in elements.
        length: Length of the range in elements, including unwanted ones in between.
        size: Shape of the requested slice.
        strides: Its strides within the range.
        target: Its position in the reader's tensor.
        has_gaps: Whether it is not contiguous, at the rank or at the reader.
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
    """Plan of all reads for a request.

    Attributes:
        reads: Reads by tensor name.
        dtypes: Published dtypes by tensor name.
    """

    reads: Mapping[str, Sequence[PlannedRead]]
    dtypes: Mapping[str, torch.dtype]


class ReshardPlans:
    """Cache (LRU) of the reshard plans of a process, shared by all its handles on publications.

    Attributes:
        computed: Number of plans computed.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._parts: OrderedDict[Hashable, StateParts] = OrderedDict()
        self._plans: OrderedDict[Hashable, ReshardPlan] = OrderedDict()

    def parts(self, layouts: tuple[bytes, ...]) -> StateParts:
        """Return the parts that ranks have published.

        Args:
            layouts: Encoded layout of each rank.

        Raises:
            ProtocolError: Layouts disagree about a tensor.
        """
        found = self._parts.get(layouts)
        return _keep(self._parts, layouts, _parts_of(layouts) if found is None else found)

    def plan(self, layouts: tuple[bytes, ...], wanted: Mapping[str, Box]) -> ReshardPlan:
        """Return the plan to read some boxes of tensors.

        Raises:
            ProtocolError: The parts of the ranks do not cover a box.
        """
        key = layouts, tuple((name, box.start, box.size) for name, box in wanted.items())
        found = self._plans.get(key)
        if found is None:
            self.computed += 1
            found = _plan_of(self.parts(layouts), wanted)
        return _keep(self._plans, key, found)


def reshard_plans() -> ReshardPlans:
    """Return the plan cache of this process.

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
                "on all replicas but one publish it as ShardOf(..., is_first=False)"
            )
        if count != place.count:
            raise ProtocolError(f"published parts must cover {name!r}, got {count} of {place.count} elements")
    return ReshardPlan(reads, {name: dtype_of(parts.by_name[name][0]) for name in wanted})


def _read_of(rank: int, box: Box, common: Box, place: Box) -> PlannedRead:
    offset, length = box.span(common)
    has_gaps = length != common.count or not common.is_whole_in(place)
    return PlannedRead(rank, offset, length, common.size, box.strides(), place.slices(common), has_gaps)


def dtype_of(one: PartOfState) -> torch.dtype:
    """Return the dtype of a published tensor.

    Raises:
        ProtocolError: Torch has no such dtype.
    """
    found = getattr(torch, one.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"a published tensor must be of a type of torch, got {one.dtype!r}")
    return found


# ---- state snapshot --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class StateSnapshot:
    """A pinned version of a publication, readable until its block is left.

    Attributes:
        version: Number of the version.
        sizes: Size of each whole tensor, by name.
    """

    version: int
    sizes: Mapping[str, tuple[int, ...]]
    _ranks: Sequence[Snapshot] = attrs.field(repr=False)
    _layouts: tuple[bytes, ...] = attrs.field(repr=False)
    """Encoded layout of each rank's parts."""
    _plans: ReshardPlans = attrs.field(repr=False)

    @property
    def _parts(self) -> StateParts:
        return self._plans.parts(self._layouts)

    @property
    def is_whole(self) -> bool:
        """True if its parts cover each tensor that is sharded over ranks; False if members joined or left meanwhile."""
        return self._parts.is_whole

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return size and dtype of each whole tensor, by name."""
        return {name: (self.sizes[name], dtype_of(found[0])) for name, found in self._parts.by_name.items()}

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a published tensor.

        Raises:
            KeyError: No tensor has that name.
        """
        found = self._parts.by_name.get(name)
        if found is None:
            raise KeyError(f"version {self.version} has no tensor {name!r}")
        return TensorEntry(name, "torch", found[0].dtype, tuple(self.sizes[name]), 0, 0)

    async def read_into(self, tensors: Mapping[str, torch.Tensor | ShardOf]) -> None:
        """Copy published tensors into tensors of this process with the same names, such as a state dict.

        Only the requested parts are read, from the ranks that have them, whatever their layout.

        Args:
            tensors: Targets for some or all names: a tensor of the published size, or a `ShardOf` or `DTensor` of that
                size. Values are cast if dtypes differ.

        Raises:
            KeyError, TypeError, ValueError: A target does not fit; nothing was copied.
            ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `RDMABuffer.read_into`.

        Blocking: a checkpoint, cancellable.
        """
        await in_trio(self._read_into)(tensors)

    async def _read_into(self, tensors: Mapping[str, torch.Tensor | ShardOf]) -> None:
        shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
        for name, shard in shards.items():
            self._check(name, shard)
        plan = self._plans.plan(self._layouts, {name: shard.box for name, shard in shards.items()})
        await _Reading(self._ranks, plan, {name: shard.tensor.detach() for name, shard in shards.items()}).run()
        for snapshot in self._ranks:
            await snapshot.check()

    async def read(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, whole; raises and blocks as `read_into`."""
        found = {name: parts[0] for name, parts in self._parts.by_name.items()}
        made = {name: new_tensor(self.sizes[name], dtype_of(one)) for name, one in found.items()}
        await self.read_into(made)
        return made

    def _check(self, name: str, shard: ShardOf) -> None:
        """Refuse a target that does not fit the published tensor."""
        parts = self._parts.by_name.get(name)
        if parts is None:
            some = ", ".join(sorted(self.sizes)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.sizes)}: {some}, ...")
        one = parts[0]
        if not one.is_global and len(parts) > 1:
            raise TypeError(
                f"{name!r} must be one tensor, got one on each of {len(parts)} ranks: read that of one rank, "
                "`async with weights.shard(...).pin() as snapshot:`"
            )
        if shard.size != one.size:
            raise ValueError(
                f"{name!r} must have the size that was published, {one.size}, or be a part of that, got {shard.size}"
            )
        if not torch.can_cast(dtype_of(one), shard.tensor.dtype):
            raise ValueError(f"{name!r} must be able to hold {one.dtype}, got {shard.tensor.dtype}")


class _Reading:
    """One read of a version into tensors, by a plan."""

    def __init__(self, ranks: Sequence[Snapshot], plan: ReshardPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        self._ranks = ranks
        self._plan = plan
        self._tensors = tensors
        self._is_near = {rank for rank, one in enumerate(ranks) if one.host == current_proc().bulk.host}
        self._copies: list[Callable[[], object]] = []
        self._rows: list[RowCopy] = []

    async def run(self) -> None:
        """Execute all reads of the plan.

        Contiguous ranges are read directly into the target. Ranges with gaps or another dtype are copied in one pass
        from the mapped memory of a process on this host; from other hosts they are read first, including the gaps.
        """
        async with AsyncExitStack() as stack:
            views: dict[int, memoryview] = {}
            for name, reads in self._plan.reads.items():
                for one in reads:
                    if self._is_direct(name, one):
                        await self._read_directly(name, one)
                    elif one.rank in self._is_near:
                        if one.rank not in views:
                            views[one.rank] = await stack.enter_async_context(_shown(self._ranks[one.rank]))
                        self._copy_later(name, one, views[one.rank])
                    else:
                        await self._read_apart(name, one)
            try:
                is_huge = sum(rows.nbytes for rows in self._rows) >= limits.RESHARD_STREAM_BYTES_MIN
                self._copies += [partial(rows.run, is_huge=is_huge) for rows in self._rows]
                if self._copies:
                    await trio.to_thread.run_sync(run_all, self._copies)
            finally:
                self._copies.clear()  # their sources are unmapped

    def _is_direct(self, name: str, one: PlannedRead) -> bool:
        tensor = self._tensors[name]
        is_same = tensor.device.type == "cpu" and tensor.dtype == self._plan.dtypes[name]
        return is_same and not one.has_gaps and tensor.is_contiguous()

    async def _read_directly(self, name: str, one: PlannedRead) -> None:
        await self._range(name, one).read_into(self._tensors[name][one.target])

    async def _read_apart(self, name: str, one: PlannedRead) -> None:
        flat = new_tensor([one.length], self._plan.dtypes[name])
        await self._range(name, one).read_into(flat)
        _put(self._tensors[name][one.target], flat.as_strided(one.size, one.strides))

    def _range(self, name: str, one: PlannedRead) -> RDMABuffer:
        width = self._plan.dtypes[name].itemsize
        return self._ranks[one.rank].buffer(name)[one.offset * width : (one.offset + one.length) * width]

    def _copy_later(self, name: str, one: PlannedRead, view: memoryview) -> None:
        dtype = self._plan.dtypes[name]
        offset = self._ranks[one.rank].entry(name).offset + one.offset * dtype.itemsize
        flat = flat_over(view, dtype, offset, one.length)
        target = self._tensors[name][one.target]
        source = flat.as_strided(one.size, one.strides)
        if (alike := rows_of(target, source)) is not None:
            self._rows += alike.cut(limits.RESHARD_CHUNK_BYTES)
            return
        rows = max(1, limits.RESHARD_CHUNK_BYTES * one.size[0] // max(1, target.nbytes)) if one.size else 1
        if not one.size or rows >= one.size[0]:
            self._copies.append(partial(_put, target, source))
            return
        for begin in range(0, one.size[0], rows):
            some = target[begin : begin + rows]
            self._copies.append(partial(_put, some, source[begin : begin + rows]))


def _shown(rank: Snapshot) -> AbstractAsyncContextManager[memoryview]:
    """Map the memory of a version; shares the mapping of transfers, so that later versions cause no page faults."""
    return mapped(rank.whole().handle, writable=False, is_shared=True)


def _put(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():  # inference tensors can be written only in this mode, others in any
        target.copy_(source)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Run copies in one thread: while all cores copy, a switch of threads costs more than a piece."""
    for call in calls:
        trio.from_thread.check_cancelled()
        call()


async def state_snapshot(version: int, ranks: Sequence[Snapshot]) -> StateSnapshot:
    """Return the snapshot of a version that is pinned on all ranks."""
    layouts: list[bytes] = []
    for snapshot in ranks:
        data = bytearray(snapshot.entry(LAYOUT).nbytes)
        await snapshot.read_into({LAYOUT: data})
        layouts.append(bytes(data))
    told, plans = tuple(layouts), reshard_plans()
    return StateSnapshot(version, plans.parts(told).sizes, ranks, told, plans)


# ---- mapped memory ---------------------------------------------------------------------------------------------------

# Tensors over read-only memory, and copies from there. Torch has no read-only tensors, so these must not be written to.
#
# Torch copies with all its compute threads. If several processes of a host read at once, as the ranks of a mesh do,
# these threads compete for the same cores: a copy then takes three times the processor time of one thread (measured:
# four readers on two cores). So plain copies use `RowCopy`, in the calling thread, bypassing the caches.


def flat_over(view: memoryview, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """Return a flat tensor over elements in a view; only for reading, and not after the view was released.

    Args:
        view: A view of bytes.
        dtype: Dtype of the elements.
        offset: Offset of the first one, in bytes.
        count: Number of elements, at least one.
    """
    assert offset + count * dtype.itemsize <= view.nbytes, "elements lie within their view"
    return torch.frombuffer(memory_at(address_of(view) + offset, count * dtype.itemsize, None), dtype=dtype)


@attrs.frozen
class RowCopy:
    """Copy of rows of equal length from one tensor into another, by one call of the native library.

    Attributes:
        into, source: Addresses of the first row.
        row_bytes: Bytes of a row.
        rows: Number of rows.
        into_step, source_step: Strides between rows, in bytes.
    """

    into: int
    source: int
    row_bytes: int
    rows: int
    into_step: int
    source_step: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.rows

    def cut(self, nbytes: int) -> list[RowCopy]:
        """Split it into pieces of at most `nbytes`, or of one row."""
        rows = max(1, nbytes // self.row_bytes)
        return [
            attrs.evolve(
                self,
                into=self.into + begin * self.into_step,
                source=self.source + begin * self.source_step,
                rows=min(rows, self.rows - begin),
            )
            for begin in range(0, self.rows, rows)
        ]

    def run(self, *, is_huge: bool) -> None:
        """Copy, without the GIL.

        Args:
            is_huge: Whether the whole copy, of which this may be a piece, exceeds the caches.
        """
        library = load()
        ffi = library.ffi
        into, source = ffi.cast("uint8_t *", self.into), ffi.cast("uint8_t *", self.source)
        library.lib.tm_copy_rows(
            into, self.into_step, source, self.source_step, self.row_bytes, self.rows, int(is_huge)
        )


def rows_of(target: torch.Tensor, source: torch.Tensor) -> RowCopy | None:
    """Return the row copy of a tensor into another one; None if strides do not allow it, or values would be cast.

    Args:
        target: A tensor of the same size.
        source: A tensor from `flat_over`, perhaps strided.
    """
    if type(target) is not torch.Tensor or target.dtype != source.dtype or target.device.type != "cpu":
        return None
    if target.layout is not torch.strided or target.is_conj() or target.is_neg() or not target.numel():
        return None
    dims = _merged(target.shape, target.stride(), source.stride())
    width = target.element_size()
    length = 1
    if dims and dims[-1][1:] == (1, 1):
        length = dims.pop()[0]
    if len(dims) > 1 or length * width < limits.RESHARD_ROW_BYTES_MIN:
        return None
    rows, into_step, source_step = dims[0] if dims else (1, length, length)
    if into_step < length:
        return None  # an expanded tensor, which torch refuses
    address = target.data_ptr()
    return RowCopy(address, source.data_ptr(), length * width, rows, into_step * width, source_step * width)


def _merged(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return length and strides of the dimensions of two tensors, merging dimensions that are contiguous in both."""
    found: list[tuple[int, int, int]] = []
    for length, a, b in zip(size, one, other, strict=True):
        if length == 1:
            continue
        if found and found[-1][1:] == (length * a, length * b):
            found[-1] = (found[-1][0] * length, a, b)
        else:
            found.append((length, a, b))
    return found
