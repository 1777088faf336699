"""`MeshTensor`: what looks like a tensor at the controller and is one on every rank of a team."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from trimesh.tensor.controller.binary import WithOperators
from trimesh.tensor.controller.changed_bases import note_change
from trimesh.tensor.controller.compiling import check_not_compiled

if TYPE_CHECKING:
    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.tensor.controller.operations import Operations
    from trimesh.tensor.controller.plan import Meta
    from trimesh.tensor.controller.team import Team
    from trimesh.tensor.protocol.placement import Cut


_DATA: Any = torch.Tensor.data


class Held:
    """The right to a tensor on the ranks: when the last holder is gone it is freed there, without a round trip.

    Attributes:
        team: The ranks.
        ref: Its number there.
    """

    __slots__ = ("ref", "team")

    def __init__(self, team: Team, ref: int) -> None:
        self.team = team
        self.ref = ref
        team.living += 1

    def __del__(self) -> None:
        self.team.free(self.ref)


class MeshTensor(WithOperators):
    """A tensor on the ranks of a mesh. Made by torch's own functions, never by its class.

    Attributes:
        _meta: Its metadata.
        _held: Where it is.
        _above: What the rooms above do with it, handed in once by `assembly`.
    """

    _meta: Meta
    _held: Held
    _above: ClassVar[Operations]

    __slots__ = ("_held", "_meta")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the ranks: see `issue`."""
        del types
        check_not_compiled()
        return cls._above.issue(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is without asking the ranks; `str(t)` and `print(t)` ask them."""
        del tensor_contents
        meta, team = self._meta, self._held.team
        kind = "global tensor" if meta.is_global else "tensor"
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(meta.dtype).removeprefix("torch.")
        return f"<{kind} {dtype}{list(meta.size)} on {team.name}{grad}>"

    @property
    def data(self) -> torch.Tensor:
        """The same tensor, unknown to autograd; what is set is what this handle is on from now on."""
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, MeshTensor):
            raise TypeError(f"the data of a mesh tensor must be a mesh tensor, got {type(other).__qualname__}")
        _DATA.__set__(self, other)
        is_alike = self._meta is other._meta
        self._held, self._meta = other._held, other._meta
        if not is_alike and not self.is_inference():
            note_change(self, version=self._version, is_moved=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshTensor:
        """Return a copy on the same ranks; modules are copied so."""
        found: MeshTensor | None = memo.get(id(self))
        if found is not None:
            return found
        if not self.is_leaf:
            raise RuntimeError("a copy must be of a tensor without history, got a result: write t.detach() first")
        with torch.no_grad():
            made = self.detach().clone()
        assert isinstance(made, MeshTensor)
        memo[id(self)] = made
        made.requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))  # a parameter is known by an entry there
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def new_tensor(  # type: ignore[override]
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return a tensor of numbers of this process, on the ranks of this one: each of them has all of it."""
        dtype = dtype or self.dtype
        if isinstance(data, MeshTensor):
            return data.detach().to(dtype, copy=True).requires_grad_(requires_grad)
        with torch._C._DisableTorchDispatch():  # a mesh may be active
            here = torch.as_tensor(data, dtype=dtype).detach()
        if device is not None and torch.device(device) != self.device:
            return here.to(device, copy=True).requires_grad_(requires_grad)
        team = self._held.team
        made: MeshTensor = (
            self._above.put_global(here, team) if self._meta.is_global else self._above.upload(here, team)
        )
        return made.requires_grad_(requires_grad)

    def fill_diagonal_(self, fill_value: Any, wrap: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - torch's
        """Fill the diagonal, as torch's, whose own steps ask a handle where in its memory the data begins."""
        if self.ndim < 2 or (self.ndim > 2 and len(set(self.size())) > 1):
            return super().fill_diagonal_(fill_value, wrap)  # raises
        height, width = self.size()[:2]
        count, step = min(height, width), sum(self.stride())
        self.as_strided((count,), (step,)).fill_(fill_value)
        if wrap and self.ndim == 2 and height > width + 1:
            more = -(-self.numel() // (width + 1)) - count
            self[width + 1 :].as_strided((more,), (step,)).fill_(fill_value)
        return self

    def reduce(
        self,
        dims: str | Sequence[str],
        reduction: str = "sum",
        *,
        scatter: bool = False,
        out: torch.Tensor | None = None,
    ) -> MeshTensor:
        """Return what the ranks make of their tensors together: see `trimesh.tensor.reduce`."""
        result: MeshTensor = self._above.reduce(self, dims, reduction, scatter=scatter, out=out)
        return result

    def reduce_(self, dims: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False) -> MeshTensor:
        """Do it in the memory of this tensor: see `trimesh.tensor.reduce_`."""
        result: MeshTensor = self._above.reduce_(self, dims, reduction, scatter=scatter)
        return result

    def slice_mesh(self, **selection: int | slice) -> MeshTensor:
        """Return the tensor as a part of its ranks have it: `t.slice_mesh(gpus=0)`. Nothing moves.

        It shares their memory: what is written to the one in place is in the other. Its gradient is zero on the ranks
        that were left out.

        Args:
            **selection: As of `ProcMesh.slice`: a number removes its dimension, a slice keeps a part of it.

        Raises:
            ShapeError: The tensor has no such ranks.
            TypeError: It is global: its ranks have parts of one tensor.
        """
        sliced: MeshTensor = self._above.slice_mesh(self, **selection)
        return sliced

    def to_mesh(self, target: ProcMesh) -> MeshTensor:
        """Return a copy on other ranks: of a view of the same processes, or of another mesh of this controller.

        The tensor of each rank goes to the rank at the same place, or that of one rank to all. A global tensor goes to
        ranks of any extent: there it is cut along the labels that it is cut along here, as far as the target has them,
        and each rank reads what it needs. Bytes move from process to process, by the ranks' own memory. If it cannot
        be computed at the source, neither can it at the target, for the same reason. Differentiable: gradients move
        back, and those of one rank that went to all are added.

        Args:
            target: The processes.

        Raises:
            ShapeError: The sizes of the two differ, and the source is not one rank; or the tensor is global, and ranks
                of the target are missing in its extent.
            TypeError: `target` is no mesh of processes.
            ProcDied, MeshStopped: Of either mesh.
        """
        moved: MeshTensor = self._above.to_mesh(self, target)
        return moved

    def local(self, placements: Sequence[Cut] | None = None) -> MeshTensor:
        """Return, of a global tensor, each rank's part as a tensor on each rank. Not differentiable.

        Parts of a sum are added up; else nothing moves. For the whole on each rank, or other parts, write
        `trimesh.redistribute(t, [...]).local()`.

        Args:
            placements: How it lies, as `trimesh.distribute` takes it, or, where ranks have the whole, how that is to be
                cut; parts must be equal. What each rank does not have is an error when it is fetched. None: as it lies;
                the ranks are asked how that is.

        Raises:
            ShapeError: The placements do not fit the tensor, or its parts would not be equal.
            TypeError: It is no global tensor, or it needs gradients.
            MeshErrorGroup: The ranks were asked, and it could not be computed.

        Blocking: with `placements`, nothing waits; without, until the ranks have answered, and no other task runs.
        """
        made: MeshTensor = self._above.to_local(self, placements)
        return made

    def to_global(self, placements: Sequence[Cut] | None = None) -> MeshTensor:
        """Return one global tensor that has the tensors of the ranks as its parts. Not differentiable.

        Args:
            placements: How it is cut, as `trimesh.distribute` takes it. Ranks whose part is the same have the same
                values; this is not checked.

        Raises:
            ShapeError: The placements do not fit the tensor.
            TypeError: It is global, or it needs gradients.
        """
        made: MeshTensor = self._above.to_global(self, placements)
        return made

    # ---- values: these wait (rule N2) ------------------------------------------------------------------------

    def tolist(self) -> Any:
        """Return the values as torch's own does, if every rank has the same; see `blocking`."""
        return self._above.list_now(self)

    def __str__(self) -> str:
        """Return the values as text, for `print`; `repr(t)` asks no rank."""
        text: str = self._above.text_now(self)
        return text

    def __format__(self, spec: str) -> str:
        """Return the values as text; those of a single number, with a format, as that number is formatted."""
        text: str = self._above.formatted_now(self, spec)
        return text

    # ---- what is not here ------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the values are on the ranks."""
        del force
        self._refuse("has no array at the controller")

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Refuse, as `numpy` does."""
        del dtype
        self._refuse("has no array at the controller")

    def __dlpack__(self, **_: Any) -> NoReturn:
        """Refuse: there is no memory here."""
        self._refuse("has no memory at the controller")

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory here."""
        self._refuse("has no pointer at the controller")

    def untyped_storage(self) -> NoReturn:
        """Refuse: there is no memory here."""
        self._refuse("has no memory at the controller")

    def storage(self) -> NoReturn:
        """Refuse: there is no memory here."""
        self._refuse("has no memory at the controller")

    def share_memory_(self) -> NoReturn:
        """Refuse: there is no memory here."""
        self._refuse("has no memory at the controller")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would outlive what is on the ranks."""
        del protocol
        self._refuse("cannot be pickled or saved")

    def __copy__(self) -> MeshTensor:
        """Return another handle on the same memory, as `copy.copy` of a tensor does."""
        made = self.detach()
        assert isinstance(made, MeshTensor)
        made.requires_grad_(self.requires_grad)
        return made

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self!r} has its values on the ranks, and {what}: write `await trimesh.fetch(t)` for all of them, "
            "or `await trimesh.fetch_shard(t, ...)` for those of one rank"
        )


def make(meta: Meta, team: Team, ref: int) -> MeshTensor:
    """Return the handle on a tensor that the ranks of a team have, or will have, under a number."""
    return make_held(meta, Held(team, ref))


def make_held(meta: Meta, held: Held) -> MeshTensor:
    """Return another handle on a tensor that is held."""
    made: MeshTensor = torch.Tensor._make_wrapper_subclass(
        MeshTensor, meta.size, strides=meta.stride, dtype=meta.dtype, device=meta.device
    )
    made._meta = meta
    made._held = held
    return made
