"""What `ProcMesh` can do with tensors."""

from __future__ import annotations

from trimesh._runtime.ownership import OwnedProcs
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.shape.region import Region
from trimesh.tensor.activation import Activation
from trimesh.tensor.opening import engine_of
from trimesh.tensor.team import Team


def activate(owned: OwnedProcs, region: Region) -> Activation:
    """Return the block in which factories of torch make tensors on the ranks of a view."""
    return Activation(engine_of(owned).team(region))


def team_of(mesh: ProcMesh) -> Team:
    """Return the ranks that a view of processes is.

    Raises:
        RuntimeError: See `ProcMesh.activate`.
        TypeError: It is no mesh of processes.
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"tensors live on a mesh of processes, got {mesh!r}: write what `spawn_procs` returned")
    mesh._check_owned("tensors are made by the block that owns the processes")
    return engine_of(mesh._owned_here()).team(mesh._shown)
