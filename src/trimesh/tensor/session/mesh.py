"""What `ProcMesh` can do with tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimesh._runtime.life import OwnedProcs
from trimesh._runtime.tasks import in_trio_now
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.shape.region import Region
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.groups.process_group import ProcessGroup, RanksDeviceMesh
from trimesh.tensor.session.activation import Activation
from trimesh.tensor.session.opening import engine_of


def activate(procs: ProcMesh, owned: OwnedProcs, region: Region, *, is_global: bool = False) -> Activation:
    """Return the block in which factories of torch make tensors on the ranks of a view."""
    team = in_trio_now(_open)(owned, region)
    if is_global and len(team.peers) != region.extent.nelements:
        raise ShapeError(
            f"global tensors need every rank of their mesh, got {team.name}: activate a view without holes"
        )
    return Activation(procs, team, is_global=is_global)


def rank_tensor(owned: OwnedProcs, region: Region, label: str) -> MeshTensor:
    """Return a tensor that is, on each rank of a view, its own index along a dimension of the view."""
    if label not in region.extent:
        raise ShapeError(f"an index is along a dimension of {region.extent!r}, got {label!r}")
    team = engine_of(owned).team(region)
    meta = team.engine.shapes.meta((), (), torch.int64, team.engine.device)
    [made] = call_kernel(team, "index", label, outputs=[meta])
    return made


def process_group(region: Region, dims: str | Sequence[str]) -> ProcessGroup:
    """Return what stands for the process groups of a view along some of its dimensions."""
    labels = (dims,) if isinstance(dims, str) else tuple(dims)
    if not labels or any(label not in region.extent for label in labels):
        raise ShapeError(f"a process group is along dimensions of {region.extent!r}, got {dims!r}")
    return ProcessGroup(labels)


def device_mesh(region: Region) -> RanksDeviceMesh:
    """Return what stands for torch's device mesh over a view."""
    return RanksDeviceMesh(tuple(region.extent))


def team_of(mesh: ProcMesh, what: str) -> Team:
    """Return the ranks of a view that a user has named.

    Args:
        mesh: The view.
        what: What is done with it, for an error: "tensors move to".

    Raises:
        TypeError: It is no mesh of processes.
        RuntimeError: It is a reference, or `this_proc()`.
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"{what} a mesh of processes, got {mesh!r}")
    owned, region = mesh.owned_view(f"{what} processes whose block is here")
    return in_trio_now(_open)(owned, region)


def _open(owned: OwnedProcs, region: Region) -> Team:
    return engine_of(owned).team(region)
