"""What a mesh of processes can do with tensors: the engine is above this floor, and imported when it is used first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from trimesh._runtime.life import OwnedProcs
from trimesh.shape.region import Region

if TYPE_CHECKING:
    import torch

    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.tensor.groups.process_group import ProcessGroup


class MeshTensors(Protocol):
    """What a mesh can do with tensors; see the methods of `ProcMesh`."""

    def activate(self, owned: OwnedProcs, region: Region, *, is_global: bool = False) -> AbstractContextManager[None]:
        """Return the block in which factories of torch make tensors on the ranks of a view."""
        ...

    def rank_tensor(self, owned: OwnedProcs, region: Region, label: str) -> torch.Tensor:
        """Return a tensor that is, on each rank of a view, its own index along a dimension of the view."""
        ...

    def process_group(self, region: Region, dims: str | Sequence[str]) -> ProcessGroup:
        """Return what stands for the process groups of a view along some of its dimensions."""
        ...

    def run(self, procs: ProcMesh, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function on every rank of a view."""
        ...


_tensor_loads: list[Callable[[], MeshTensors]] = []


def provide_tensors(load: Callable[[], MeshTensors]) -> None:
    """Hand in, once, what imports the tensor engine, which is above this floor, when a mesh is first asked for it."""
    _tensor_loads[:] = [load]


def tensors() -> MeshTensors:
    """Return the tensor engine; imports it when it is asked for first."""
    [load] = _tensor_loads
    return load()
