"""`rdma_buffers`: what the ranks have of tensors, as memory that other processes read, or write, themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import torch
import trio
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.actors import set_proc_of_task
from trimesh.errors import MeshError, MeshErrorGroup
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.function import remote
from trimesh.tensor.rank.function_parts import Here


@attrs.define(eq=False)
class _Published:
    """The buffers of one rank, by the block that they are open in."""

    by_number: dict[int, list[RDMABuffer]] = attrs.field(factory=dict[int, list[RDMABuffer]])


@asynccontextmanager
async def rdma_buffers(tensors: Any, *, writable: bool = False) -> AsyncGenerator[ValueMesh[Any]]:
    """Let others read the memory that the ranks have of tensors: `async with trimesh.rdma_buffers(weights) as found:`.

    Nothing is copied and no process waits for another: a handle shows what the rank has now, and, while the rank writes
    there, some bytes of both. They are revoked when the block is left.

    Args:
        tensors: A tensor with one on each rank, or lists, tuples and dicts of them, all of one mesh; contiguous.
        writable: Whether others may write.

    Yields:
        For each rank the same, with an `RDMABuffer` in the place of each tensor: to be sent to actors, who read it.

    Raises:
        MeshErrorGroup: A tensor could not be computed, or is not contiguous; or a process has ended.
        TypeError: There is no mesh tensor, or they are not on the same ranks.
    """
    found = [one for one in pytree.tree_leaves(tensors) if isinstance(one, MeshTensor)]
    if not found:
        raise TypeError(f"rdma_buffers takes tensors on a mesh, got {tensors!r:.100}")
    number = found[0]._held.team.engine.shapes.new_number()
    made = await remote(_publish).fetch(None, (Here(), number, tensors, writable), {})
    try:
        yield made
    finally:
        with trio.move_on_after(limits.REVOKE_SECONDS, shield=True):
            try:
                await remote(_revoke).fetch(None, (Here(), number, found[0]), {})
            except (MeshError, MeshErrorGroup):
                pass  # with the processes that have ended nothing is left to be revoked


def _publish(rank: Any, number: int, tensors: Any, writable: bool) -> Any:  # noqa: FBT001 - it travels
    """Register what a rank has; runs in its thread."""
    published = rank.above.setdefault(_Published, _Published())
    kept = published.by_number[number] = []

    def register(tensor: torch.Tensor) -> RDMABuffer:
        kept.append(RDMABuffer(tensor, writable=writable))
        return kept[-1]

    async def register_all() -> Any:
        set_proc_of_task(rank.outside.proc)
        return pytree.tree_map_only(torch.Tensor, register, tensors)

    try:
        return rank.outside.run_in_trio(register_all)
    except BaseException:
        _revoke(rank, number, None)
        raise


def _revoke(rank: Any, number: int, _: Any) -> None:
    """Take all of one block back; runs in the rank's thread."""
    buffers = rank.above[_Published].by_number.pop(number, [])

    async def close() -> None:
        set_proc_of_task(rank.outside.proc)
        for buffer in buffers:
            await buffer.aclose()

    rank.outside.run_in_trio(close)
