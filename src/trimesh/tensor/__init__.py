"""The tensor engine: torch on the ranks of a mesh, from one script."""

from trimesh.tensor.compiled import compile  # noqa: A004 - as torch's own
from trimesh.tensor.errors import RecordingError
from trimesh.tensor.fetching import fetch, fetch_shard
from trimesh.tensor.mesh import activate
from trimesh.tensor.reduction import reduce, reduce_
from trimesh.tensor.tensor import MeshTensor

__all__ = [
    "MeshTensor",
    "RecordingError",
    "activate",
    "compile",
    "fetch",
    "fetch_shard",
    "reduce",
    "reduce_",
]
