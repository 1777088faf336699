"""Opening of a mesh's tensor engine, on its first tensor, and the tensor methods of `ProcMesh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import trio

from trimesh._runtime.life import OwnedProcs, Proc
from trimesh._runtime.tasks import in_trio_now
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshStopped, ShapeError
from trimesh.shape.region import Region
from trimesh.tensor.controller import upload
from trimesh.tensor.controller.engine import Engine
from trimesh.tensor.controller.shapes import Shapes
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.groups.groups import ProcessGroup, RanksDeviceMesh
from trimesh.tensor.session.activation import Activation, activations
from trimesh.tensor.session.service import open_service


@attrs.define(eq=False)
class _Controlled(trio.abc.Instrument):
    """Engines of one controller process; sends issued commands whenever Trio's loop is about to wait."""

    proc: Proc
    shapes: Shapes = attrs.field(factory=Shapes)
    engines: dict[int, Engine] = attrs.field(factory=dict[int, Engine])

    def before_io_wait(self, timeout: float) -> None:
        """Send the remaining commands."""
        del timeout
        is_sent = False
        for engine in self.engines.values():
            is_sent |= engine.flush()
        if is_sent:
            self.proc.transport.flush()  # the transport's own flush has already run in this turn
        if not activations.living:
            activations.sweep()

    def closed(self, engine: Engine) -> None:
        """Remove an engine; after the last one, remove this instrument, too."""
        del self.engines[engine.number]
        upload.forget(engine)
        if not self.engines:
            activations.clear()
            trio.lowlevel.remove_instrument(self)
            del self.proc.above[_Controlled]


class WithoutProcesses:
    """Substitute for the processes of a simulated mesh that has an engine but no processes.

    Attributes:
        engine: Engine of the mesh.
    """

    engine: Engine


def engine_of(owned: OwnedProcs | WithoutProcesses) -> Engine:
    """Return the engine of a mesh of processes; open it on the first call.

    Raises:
        RuntimeError: The mesh is `this_proc()`, or this is not the thread of its Trio loop.
        MeshStopped: The mesh's block is being left, or was.
    """
    if isinstance(owned, WithoutProcesses):
        return owned.engine
    proc = owned.proc
    if owned.members is None:
        raise RuntimeError(
            "tensors need a mesh of other processes, got this_proc(): use torch directly, or write "
            "`async with this_host().spawn_procs(...)` and activate that mesh"
        )
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(
            f"{owned.info.name} must be activated in the thread of its Trio loop, got another thread: "
            "call the function that does so by trio.from_thread.run_sync(function)"
        )
    if owned.block is None or owned.is_stopping:
        raise MeshStopped(f"{owned.info.name} accepts no operations: the block that owns its processes is being left")
    found = _controlled(proc)
    number = owned.whole.mesh
    assert isinstance(number, int)
    engine = found.engines.get(number)
    if engine is None:
        owned.block.check_open()
        engine = found.engines[number] = Engine(
            proc, number, owned, found.shapes, found.engines, found.closed, upload.joined
        )
        owned.block.adopt(engine)
        owned.fix_size("its processes hold tensors (activate), and a team keeps its ranks")
        upload.follow(engine)
    return engine


def shapes_of(proc: Proc) -> Shapes:
    return _controlled(proc).shapes


def _controlled(proc: Proc) -> _Controlled:
    found = proc.above.get(_Controlled)
    if found is None:
        service = open_service(proc)
        found = proc.above[_Controlled] = _Controlled(proc, engines=service.engines)
        trio.lowlevel.add_instrument(found)
    assert isinstance(found, _Controlled)
    return found


# ---- tensor methods of `ProcMesh` ------------------------------------------------------------------------------------


def activate(procs: ProcMesh, owned: OwnedProcs, region: Region, *, is_global: bool = False) -> Activation:
    """Return a block in which torch's factories make tensors on the ranks of a view."""
    team = in_trio_now(_open)(owned, region)
    if is_global and len(team.peers) != region.extent.nelements:
        raise ShapeError(
            f"global tensors need every rank of their mesh, got {team.name}: activate a view without holes"
        )
    return Activation(procs, team, is_global=is_global)


def rank_tensor(owned: OwnedProcs, region: Region, label: str) -> MeshTensor:
    """Return a tensor with each rank's own index along a dimension of the view."""
    if label not in region.extent:
        raise ShapeError(f"an index must be along a dimension of {region.extent!r}, got {label!r}")
    team = engine_of(owned).team(region)
    meta = team.engine.shapes.meta((), (), torch.int64, team.engine.device)
    [made] = call_kernel(team, "index", label, outputs=[meta])
    return made


def process_group(region: Region, dims: str | Sequence[str]) -> ProcessGroup:
    """Return a reference to the process groups of a view along some of its dimensions."""
    labels = (dims,) if isinstance(dims, str) else tuple(dims)
    if not labels or any(label not in region.extent for label in labels):
        raise ShapeError(f"a process group must be along dimensions of {region.extent!r}, got {dims!r}")
    return ProcessGroup(labels)


def device_mesh(region: Region) -> RanksDeviceMesh:
    """Return a reference to torch's device mesh over a view."""
    return RanksDeviceMesh(tuple(region.extent))


def team_of(mesh: ProcMesh, what: str) -> Team:
    """Return the team of a view that the user has passed.

    Args:
        mesh: The view.
        what: Use of the view, for an error: "tensors move to".

    Raises:
        TypeError: `mesh` is not a mesh of processes.
        RuntimeError: `mesh` is a reference, or `this_proc()`.
    """
    if not isinstance(mesh, ProcMesh):
        given: Any = mesh
        if type(given).__module__.startswith("trimesh.blocking"):
            raise TypeError(
                f"{what} a mesh of trimesh, got the blocking {given!r}: write trimesh.blocking.run(function, procs) "
                "with an async function that works with its tensors"
            )
        raise TypeError(f"{what} a mesh of processes, got {mesh!r}")
    owned, region = mesh.owned_view(f"{what} processes whose block is here")
    return in_trio_now(_open)(owned, region)


def _open(owned: OwnedProcs, region: Region) -> Team:
    return engine_of(owned).team(region)
