"""What `ProcMesh` can do with tensors."""

from __future__ import annotations

from trimesh._runtime.foreign import in_trio_now
from trimesh._runtime.ownership import OwnedProcs
from trimesh.shape.region import Region
from trimesh.tensor.activation import Activation
from trimesh.tensor.opening import engine_of
from trimesh.tensor.team import Team


def activate(owned: OwnedProcs, region: Region) -> Activation:
    """Return the block in which factories of torch make tensors on the ranks of a view."""
    return Activation(in_trio_now(_team)(owned, region))


def _team(owned: OwnedProcs, region: Region) -> Team:
    return engine_of(owned).team(region)
