"""The tensor engine: torch on the ranks of a mesh, from one script."""

from trimesh.tensor.fetching import fetch, fetch_shard
from trimesh.tensor.mesh import activate
from trimesh.tensor.reduction import reduce, reduce_
from trimesh.tensor.tensor import MeshTensor

__all__ = ["MeshTensor", "activate", "fetch", "fetch_shard", "reduce", "reduce_"]
