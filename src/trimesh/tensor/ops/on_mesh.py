"""Tensor methods of `ProcMesh`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.function import RemoteFunction
from trimesh.tensor.session.opening import activate, device_mesh, process_group, rank_tensor, team_of

__all__ = ["activate", "device_mesh", "process_group", "rank_tensor", "run"]


@lru_cache(maxsize=limits.TENSOR_RUN_FUNCTIONS)
def _remote(function: Any) -> RemoteFunction[..., Any]:
    return RemoteFunction(function, None)


def run(procs: ProcMesh, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on every rank of a view, with its own part of each tensor; see `ProcMesh.run`."""
    team = team_of(procs, "functions run on")
    found = function if isinstance(function, RemoteFunction) else _remote(function)

    def own_part(tensor: MeshTensor) -> MeshTensor:
        if tensor._held.team is not team:
            raise TypeError(
                f"{found.__qualname__} runs on {team.name}, got a tensor on {tensor._held.team.name}: "
                "write t.to_mesh(mesh), or run it on the mesh of its tensors"
            )
        return tensor.local() if tensor._meta.is_global else tensor

    own_args, own_kwargs = pytree.tree_map_only(MeshTensor, own_part, (args, kwargs))
    with procs.activate():
        return found(*own_args, **own_kwargs)
