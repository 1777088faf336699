"""What a mesh of processes can do with tensors: the engine is above this floor, and imported when it is used first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trimesh._runtime.life import OwnedProcs
from trimesh.shape.region import Region

if TYPE_CHECKING:
    import torch

    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.tensor.groups.groups import ProcessGroup, RanksDeviceMesh
    from trimesh.tensor.ops import on_mesh

R = TypeVar("R")


class ModuleAbove:
    """A module of a floor above this one, which `_assembly` hands in; imported when a name of it is used first."""

    def __init__(self) -> None:
        self.load: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


tensor_module = ModuleAbove()
if not TYPE_CHECKING:
    on_mesh = tensor_module


class MakesTensors:
    """A mesh of processes, as far as these hold tensors."""

    _shown: Region

    @abstractmethod
    def _check_owned(self, rule: str) -> None: ...

    @abstractmethod
    def _owned_here(self) -> OwnedProcs: ...

    def activate(self, *, global_tensors: bool = False) -> AbstractContextManager[None]:
        """Return the block in which torch makes its tensors on the ranks of this view: one on each.

        `with procs.activate(): t = torch.rand(3, 4)`. It is in force in the task that has entered it and in those that
        it starts, and nests. Operations on tensors of a mesh need no activation.

        Args:
            global_tensors: Whether they are global ones instead, as of `trimesh.replicate`: for what code makes beside
                global tensors (a mask, the first state of an LSTM, the counters of a fused optimizer).

        Raises:
            ShapeError: Global tensors are asked for, and ranks are missing in the extent of this view.
            RuntimeError: This is a reference, or `this_proc()`.
            ImportError: torch is not installed.

        Blocking: no checkpoint; what is issued is sent on its way without waiting for it.
        """
        self._check_owned("tensors are made by the block that owns the processes")
        procs = cast("ProcMesh", self)
        return on_mesh.activate(procs, self._owned_here(), self._shown, is_global=global_tensors)

    def rank_tensor(self, label: str) -> torch.Tensor:
        """Return a tensor on each process of this view: its own index along a dimension, an int64 of no dimension.

        Args:
            label: A dimension of this view.

        Raises:
            ShapeError: There is no such dimension.
            RuntimeError: This is a reference.

        Blocking: no checkpoint.
        """
        self._check_owned("tensors are made by the block that owns the processes")
        return on_mesh.rank_tensor(self._owned_here(), self._shown, label)

    def run(self, function: Callable[..., R] | str, /, *args: Any, **kwargs: Any) -> R:
        """Run a function on every rank of this view, with its own part of each tensor; return its tensors.

        It is `trimesh.remote(function)(...)` while this view is active, and waits for nothing; global tensors are given
        to it by their parts (`t.local()`), which waits as `.item()` does.

        Args:
            function: As `trimesh.remote` takes it, and best one that is defined once: it is sent once.
            *args: Tensors on these ranks, and other values.
            **kwargs: Like `args`.

        Raises:
            TypeError: A tensor is not on these ranks, has gradients though it is global, or see `trimesh.remote`.
            RuntimeError: This is a reference.

        Blocking: no checkpoint.
        """
        result: R = on_mesh.run(cast("ProcMesh", self), function, args, kwargs)
        return result

    def process_group(self, dims: str | Sequence[str]) -> ProcessGroup:
        """Return what is, as an argument of a remote function, a `torch.distributed.ProcessGroup` on each rank.

        Its members are the ranks, of those that the function runs on, that differ in these dimensions only. The
        function needs a `propagate`: it cannot be tried out where there is no group.

        Args:
            dims: A dimension of this view, or several.

        Raises:
            ShapeError: There is no such dimension.

        Blocking: no checkpoint; ranks connect when they use it first.
        """
        return on_mesh.process_group(self._shown, dims)

    def device_mesh(self) -> RanksDeviceMesh:
        """Return what is, as an argument of a remote function, a `torch.distributed.device_mesh.DeviceMesh` there.

        It has the labels and sizes of this view, whose ranks the function runs on, and their process groups. The global
        tensors that the function is given are `DTensor`s on it, and the `DTensor`s on it that it returns are global
        tensors.

        Raises:
            TypeError: Of the function: it runs on a view with other labels.
            ShapeError: Of the function: ranks are missing in the view.

        Blocking: no checkpoint; ranks connect when they use it first.
        """
        return on_mesh.device_mesh(self._shown)
