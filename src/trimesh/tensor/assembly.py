"""Registers implementations of higher rooms that lower ones use: operations of mesh tensors, and their pickling."""

from __future__ import annotations

from trimesh._wire.memory import register_reducer
from trimesh.tensor.controller.team import Operations
from trimesh.tensor.controller.tensor import MeshTensor, reduce_tensor
from trimesh.tensor.controller.upload import upload
from trimesh.tensor.issue.display import formatted_now, text_now
from trimesh.tensor.issue.issue import issue, list_now
from trimesh.tensor.ops.global_tensor import make_global, put_global, to_global, to_local, whole
from trimesh.tensor.ops.movement import slice_tensor, tensor_to_mesh
from trimesh.tensor.ops.reduction import reduce, reduce_


def assemble() -> None:
    """Register all implementations; called when the package is imported."""
    MeshTensor._above = Operations(
        issue=issue,
        make_global=make_global,
        upload=upload,
        put_global=put_global,
        whole=whole,
        reduce=reduce,
        reduce_=reduce_,
        slice_mesh=slice_tensor,
        to_mesh=tensor_to_mesh,
        to_local=to_local,
        to_global=to_global,
        list_now=list_now,
        text_now=text_now,
        formatted_now=formatted_now,
    )
    register_reducer(MeshTensor, reduce_tensor)
