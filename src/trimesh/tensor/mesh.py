"""What `ProcMesh` can do with tensors."""

from __future__ import annotations

from trimesh._runtime.ownership import OwnedProcs
from trimesh.shape.region import Region
from trimesh.tensor.activation import Activation
from trimesh.tensor.opening import engine_of


def activate(owned: OwnedProcs, region: Region) -> Activation:
    """Return the block in which factories of torch make tensors on the ranks of a view."""
    return Activation(engine_of(owned).team(region))
