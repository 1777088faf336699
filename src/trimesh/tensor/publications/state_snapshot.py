"""One version of what the ranks of a mesh have published, while it is pinned on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial

import attrs
import torch
import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh.rdma.buffers.buffer import RDMABuffer, mapped
from trimesh.rdma.publications.board import TensorEntry
from trimesh.rdma.publications.reading import Snapshot
from trimesh.tensor.controller.shard_of import ShardOf, shard_of
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.protocol.state_layout import LAYOUT
from trimesh.tensor.publications.mapped_memory import RowCopy, flat_over, rows_of
from trimesh.tensor.publications.reshard_plan import (
    PlannedRead,
    ReshardPlan,
    ReshardPlans,
    StateParts,
    dtype_of,
    reshard_plans,
)


@attrs.define(eq=False)
class StateSnapshot:
    """A version that is pinned: what it holds, and how to get it. Of no use after its block.

    Attributes:
        version: Its number.
        sizes: What it holds, by name: the size of the whole tensor.
    """

    version: int
    sizes: Mapping[str, tuple[int, ...]]
    _ranks: Sequence[Snapshot] = attrs.field(repr=False)
    _layouts: tuple[bytes, ...] = attrs.field(repr=False)
    """What each rank says of its parts."""
    _plans: ReshardPlans = attrs.field(repr=False)

    @property
    def _parts(self) -> StateParts:
        return self._plans.parts(self._layouts)

    @property
    def is_whole(self) -> bool:
        """Whether it has all of each tensor that is one over the ranks: not if ranks have come or gone since."""
        return self._parts.is_whole

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return what it holds, by name: the size of the whole tensor, and its type."""
        return {name: (self.sizes[name], dtype_of(found[0])) for name, found in self._parts.by_name.items()}

    def entry(self, name: str) -> TensorEntry:
        """Return what a whole tensor was published as.

        Raises:
            KeyError: There is none of that name.
        """
        found = self._parts.by_name.get(name)
        if found is None:
            raise KeyError(f"version {self.version} has no tensor {name!r}")
        return TensorEntry(name, "torch", found[0].dtype, tuple(self.sizes[name]), 0, 0)

    async def read_into(self, tensors: Mapping[str, torch.Tensor | ShardOf]) -> None:
        """Copy published tensors into those of this process that have the same names: a state dict.

        Only what is asked for is read, from the ranks that have it, whatever the layout there.

        Args:
            tensors: Some names or all; each has the size of what was published, or is a `ShardOf` that or a `DTensor`.
                Values are cast where the types differ.

        Raises:
            KeyError, TypeError, ValueError: One of them does not fit; nothing was copied.
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
        """Return a copy of everything, whole; raises and blocks as `read_into`."""
        found = {name: parts[0] for name, parts in self._parts.by_name.items()}
        made = {name: new_tensor(self.sizes[name], dtype_of(one)) for name, one in found.items()}
        await self.read_into(made)
        return made

    def _check(self, name: str, shard: ShardOf) -> None:
        """Refuse what a published tensor cannot be read into."""
        parts = self._parts.by_name.get(name)
        if parts is None:
            some = ", ".join(sorted(self.sizes)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.sizes)}: {some}, ...")
        one = parts[0]
        if not one.is_global and len(parts) > 1:
            raise TypeError(
                f"{name!r} is a tensor on each of {len(parts)} ranks, not one whole: read what one of them has, "
                "`async with weights.shard(...).pin() as snapshot:`"
            )
        if shard.size != one.size:
            raise ValueError(
                f"{name!r} must have the size that was published, {one.size}, or be a part of that, got {shard.size}"
            )
        if not torch.can_cast(dtype_of(one), shard.tensor.dtype):
            raise ValueError(f"{name!r} must be able to hold {one.dtype}, got {shard.tensor.dtype}")


class _Reading:
    """One way to read a version into tensors."""

    def __init__(self, ranks: Sequence[Snapshot], plan: ReshardPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        self._ranks = ranks
        self._plan = plan
        self._tensors = tensors
        self._is_near = {rank for rank, one in enumerate(ranks) if one.host == current_proc().bulk.mover.home.host}
        self._copies: list[Callable[[], object]] = []
        self._rows: list[RowCopy] = []

    async def run(self) -> None:
        """Read all that is planned.

        What lies in one piece is read straight to its place. What has gaps or another type is copied from the memory of
        the other process, if that is of this host, in one pass; from other hosts it is read first, gaps and all.
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
                self._copies.clear()  # what they read is there no longer

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
    """Return the memory of a version, mapped as it is for transfers: so that later versions have no page faults."""
    return mapped(rank.whole().handle, writable=False, is_shared=True)


def _put(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():  # what was made there can be changed nowhere else, all others anywhere
        target.copy_(source)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Copy, in one thread: each change of threads costs more than a piece where all cores copy."""
    for call in calls:
        trio.from_thread.check_cancelled()
        call()


async def state_snapshot(version: int, ranks: Sequence[Snapshot]) -> StateSnapshot:
    """Return a version that is pinned on all ranks."""
    layouts: list[bytes] = []
    for snapshot in ranks:
        buffer = snapshot.buffer(LAYOUT)
        data = bytearray(buffer.nbytes)
        await buffer.read_into(data)
        layouts.append(bytes(data))
    told, plans = tuple(layouts), reshard_plans()
    return StateSnapshot(version, plans.parts(told).sizes, ranks, told, plans)
