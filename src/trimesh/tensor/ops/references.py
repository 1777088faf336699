"""`rref`: results of actors' endpoints as mesh tensors; `rdma_buffers`: memory of mesh tensors for other processes."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
import torch
import trio
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.actors import set_proc_of_task
from trimesh._runtime.calls import Request, invoke
from trimesh._runtime.peers import Target
from trimesh._runtime.services import TENSORS
from trimesh.actor.endpoint import Endpoint
from trimesh.actor.verbs import bare, bind
from trimesh.errors import MeshError, MeshErrorGroup
from trimesh.ids import MeshId
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.function import remote
from trimesh.tensor.protocol import messages
from trimesh.tensor.rank.function_parts import Here


def rref(
    endpoint: Endpoint[..., Any],
    /,
    *args: Any,
    propagate: Callable[..., Any] | Literal["inspect"] = "inspect",
    **kwargs: Any,
) -> Any:
    """Call an endpoint of actors in the ranks' processes; return its tensors as tensors of the mesh.

    It runs in order with operations: each rank calls the actor in its own process and waits for it. Tensor arguments
    arrive as copies; an error poisons the result.

    Args:
        endpoint: `actors.name`; one member must live in the process of each rank.
        *args: Arguments of the endpoint: mesh tensors, and other values.
        propagate: As in `remote`: a function that takes the same arguments and returns examples of the results; or
            "inspect", which waits for the results.
        **kwargs: Like `args`.

    Raises:
        TypeError: The tensors are not on the same ranks, one is global, or `endpoint` is not an endpoint of a mesh.
        RuntimeError: There are no tensors among the arguments, and no mesh is active.

    Blocking: with "inspect", as `.item()` does.
    """
    if not isinstance(endpoint, Endpoint):
        raise TypeError(f"rref needs an endpoint of an actor mesh, `actors.name`, got {endpoint!r}")
    if propagate != "inspect" and not callable(propagate):
        raise ValueError(f"propagate must be a function or 'inspect', got {propagate!r}: an endpoint cannot run here")
    view, spec = endpoint._mesh, endpoint._spec
    bind(view, spec, args, kwargs)
    view.check_open()
    if any(isinstance(one, MeshTensor) and one._meta.is_global for one in pytree.tree_leaves((args, kwargs))):
        raise TypeError(
            f"rref takes tensors on each rank, got a global one for {spec.name}: write t.local(), or use a function "
            "under @trimesh.remote, which gets a DTensor"
        )
    how: Any = propagate
    if callable(propagate):
        example = propagate
        how = functools.wraps(example)(lambda _, __, ___, args, kwargs: example(*args, **kwargs))
    return remote(_call_member, propagate=how)(Here(), int(view.info.mesh), spec.name, args, kwargs)


def _call_member(rank: Any, mesh: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the member of an actor mesh in the process of a rank; runs in the rank's thread."""
    proc = rank.outside.proc

    async def call() -> Any:
        cell = proc.cells.get(MeshId(mesh))
        spec = None if cell is None else cell.endpoints.get(name)
        if cell is None or spec is None:
            raise LookupError(f"rref needs an actor with the endpoint {name!r} in each rank's process, got none here")
        request = Request(cell.spec.name, name, args, kwargs, lambda _: cell.origin(name), spec=spec)
        watch = trio.CancelScope()
        proc.serve(_watch, rank.outside, trio.lowlevel.current_task(), watch)
        try:
            return bare(await invoke(proc, [Target(proc.me, MeshId(mesh))], request, fail_fast=False))
        finally:
            watch.cancel()

    return rank.outside.run_in_trio(call)


async def _watch(outside: Any, task: trio.lowlevel.Task, scope: trio.CancelScope) -> None:
    """Report periodically that a task waits for an actor of the controller, which may wait for this rank (rule N2)."""
    patience = limits.SIGNAL_SECONDS
    with scope:
        while True:
            await trio.sleep(patience)
            patience = min(2 * patience, limits.TENSOR_STUCK_SECONDS_MAX)
            most = limits.DEADLOCK_REFS_MAX
            calls, waits = outside.proc.deadlocks.in_the_way(task, outside.controller.proc_id)
            if calls or waits:
                stuck = messages.Stuck(outside.engine, list(calls[:most]), tuple(waits[:most]))
                message = messages.encode(stuck)
                outside.proc.services.cast([outside.controller], TENSORS, message)


# ---- `rdma_buffers`: the ranks' memory of tensors, for one-sided reads and writes by other processes -----------------


@attrs.define(eq=False)
class _Published:
    """The buffers of one rank, by number of their block."""

    by_number: dict[int, list[RDMABuffer]] = attrs.field(factory=dict[int, list[RDMABuffer]])


@asynccontextmanager
async def rdma_buffers(tensors: Any, *, writable: bool = False) -> AsyncGenerator[ValueMesh[Any]]:
    """Grant access to the ranks' memory of tensors: `async with trimesh.rdma_buffers(weights) as found:`.

    Nothing is copied or synchronised: a read returns the bytes that the rank has at that time, and during a write of
    the rank bytes from before and after it. Buffers are revoked when the block is left.

    Args:
        tensors: A tensor on each rank, or lists, tuples and dicts of them, all on the same ranks; contiguous.
        writable: Whether others may write.

    Yields:
        For each rank the same structure, with an `RDMABuffer` in place of each tensor; send it to actors that read.

    Raises:
        MeshErrorGroup: A tensor could not be computed, or is not contiguous; or a process has ended.
        TypeError: There is no mesh tensor, or the tensors are not on the same ranks.
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
                pass  # the processes have ended, so nothing is left to revoke


def _publish(rank: Any, number: int, tensors: Any, writable: bool) -> Any:  # noqa: FBT001 - it travels
    """Register the memory of a rank's tensors; runs in its thread."""
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
    """Revoke all buffers of one block; runs in the rank's thread."""
    buffers = rank.above[_Published].by_number.pop(number, [])

    async def close() -> None:
        set_proc_of_task(rank.outside.proc)
        for buffer in buffers:
            await buffer.aclose()

    rank.outside.run_in_trio(close)
