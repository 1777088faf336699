"""`MeshTensor`: a handle at the controller that behaves as a tensor, for tensors on every rank of a team."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import attrs
import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from trimesh._runtime.life import rebuild
from trimesh._runtime.services import TENSORS
from trimesh._runtime.values import Guarded
from trimesh._wire.memory import Sink
from trimesh.tensor.controller.recording import check_not_compiled, is_traced

if TYPE_CHECKING:
    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.tensor.controller.shapes import Meta
    from trimesh.tensor.controller.team import Operations, Team
    from trimesh.tensor.protocol.placement import Cut


# Python's binary operators on mesh tensors: torch's, but with the original error.
#
# Torch turns a `TypeError` of `t + other` into `NotImplemented`, which Python reports as "unsupported operand type(s)";
# `t == other` even returns False. So a refused operation is retried through its function, which raises.


def _operator(name: str, function: Callable[[Any, Any], Any]) -> Any:
    plain = getattr(torch.Tensor, name)

    def operator(self: torch.Tensor, other: Any) -> Any:
        if is_traced():  # the compiler mistakes `plain` for this function and recurses
            return function(self, other)
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, torch.Tensor):
            return function(self, other)
        return result

    return operator


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


class WithOperators(torch.Tensor):
    """A tensor whose binary operators raise the same errors as their functions."""

    __slots__ = ()

    __add__ = _operator("__add__", torch.add)
    __sub__ = _operator("__sub__", torch.sub)
    __mul__ = _operator("__mul__", torch.mul)
    __truediv__ = _operator("__truediv__", torch.true_divide)
    __floordiv__ = _operator("__floordiv__", torch.floor_divide)
    __mod__ = _operator("__mod__", torch.remainder)
    __pow__ = _operator("__pow__", torch.pow)
    __matmul__ = _operator("__matmul__", torch.matmul)
    __and__ = _operator("__and__", torch.bitwise_and)
    __or__ = _operator("__or__", torch.bitwise_or)
    __xor__ = _operator("__xor__", torch.bitwise_xor)
    __lshift__ = _operator("__lshift__", torch.bitwise_left_shift)
    __rshift__ = _operator("__rshift__", torch.bitwise_right_shift)
    __eq__ = _operator("__eq__", torch.eq)
    __ne__ = _operator("__ne__", torch.ne)
    __lt__ = _operator("__lt__", torch.lt)
    __le__ = _operator("__le__", torch.le)
    __gt__ = _operator("__gt__", torch.gt)
    __ge__ = _operator("__ge__", torch.ge)
    __hash__ = torch.Tensor.__hash__  # a class that defines `__eq__` inherits no hash

    __radd__ = _operator("__radd__", _swapped(torch.add))
    __rsub__ = _operator("__rsub__", _swapped(torch.sub))
    __rmul__ = _operator("__rmul__", _swapped(torch.mul))
    __rtruediv__ = _operator("__rtruediv__", _swapped(torch.true_divide))
    __rfloordiv__ = _operator("__rfloordiv__", _swapped(torch.floor_divide))
    __rmod__ = _operator("__rmod__", _swapped(torch.remainder))
    __rpow__ = _operator("__rpow__", _swapped(torch.pow))
    __rmatmul__ = _operator("__rmatmul__", _swapped(torch.matmul))
    __rand__ = _operator("__rand__", _swapped(torch.bitwise_and))
    __ror__ = _operator("__ror__", _swapped(torch.bitwise_or))
    __rxor__ = _operator("__rxor__", _swapped(torch.bitwise_xor))
    __rlshift__ = _operator("__rlshift__", _swapped(torch.bitwise_left_shift))
    __rrshift__ = _operator("__rrshift__", _swapped(torch.bitwise_right_shift))

    __iadd__ = _operator("__iadd__", torch.Tensor.add_)
    __isub__ = _operator("__isub__", torch.Tensor.sub_)
    __imul__ = _operator("__imul__", torch.Tensor.mul_)
    __itruediv__ = _operator("__itruediv__", torch.Tensor.div_)
    __ifloordiv__ = _operator("__ifloordiv__", torch.Tensor.floor_divide_)
    __imod__ = _operator("__imod__", torch.Tensor.remainder_)
    __ipow__ = _operator("__ipow__", torch.Tensor.pow_)
    __iand__ = _operator("__iand__", torch.Tensor.bitwise_and_)
    __ior__ = _operator("__ior__", torch.Tensor.bitwise_or_)
    __ixor__ = _operator("__ixor__", torch.Tensor.bitwise_xor_)
    __ilshift__ = _operator("__ilshift__", torch.Tensor.bitwise_left_shift_)
    __irshift__ = _operator("__irshift__", torch.Tensor.bitwise_right_shift_)


# ---- tensor ----------------------------------------------------------------------------------------------------------

_DATA: Any = torch.Tensor.data


class Held:
    """Reference to a tensor on the ranks, which is freed there, without a round trip, when this object is collected.

    Attributes:
        team: The ranks.
        ref: Number of the tensor there.
    """

    __slots__ = ("ref", "team")

    def __init__(self, team: Team, ref: int) -> None:
        self.team = team
        self.ref = ref
        team.living += 1

    def __del__(self) -> None:
        self.team.freed.append(self.ref)  # from any thread, at any time; the next commands free it


class MeshTensor(WithOperators):
    """A tensor on the ranks of a mesh. Made by torch's own functions, never by its class.

    Attributes:
        _meta: Metadata.
        _held: Reference to the tensor on the ranks.
        _above: Operations of higher rooms, registered once by `assembly`.
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
        """Describe the tensor without querying the ranks; `str(t)` and `print(t)` fetch its values."""
        del tensor_contents
        meta, team = self._meta, self._held.team
        kind = "global tensor" if meta.is_global else "tensor"
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(meta.dtype).removeprefix("torch.")
        return f"<{kind} {dtype}{list(meta.size)} on {team.name}{grad}>"

    @property
    def data(self) -> torch.Tensor:
        """The same tensor, detached from autograd. Assigning a tensor makes this handle refer to it."""
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
        """Return a copy on the same ranks, as `copy.deepcopy` of a module needs."""
        found: MeshTensor | None = memo.get(id(self))
        if found is not None:
            return found
        if not self.is_leaf:
            raise RuntimeError("deepcopy needs a tensor without history, got a result: write t.detach() first")
        with torch.no_grad():
            made = self.detach().clone()
        assert isinstance(made, MeshTensor)
        memo[id(self)] = made
        made.requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))  # an entry there marks parameters
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
        """Return a tensor with data of this process, whole on each rank of this tensor."""
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
        """Fill the diagonal as torch does, whose implementation would need the storage offset of a handle."""
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
        """Return the reduction of the ranks' tensors: see `trimesh.tensor.reduce`."""
        result: MeshTensor = self._above.reduce(self, dims, reduction, scatter=scatter, out=out)
        return result

    def reduce_(self, dims: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False) -> MeshTensor:
        """Reduce in place: see `trimesh.tensor.reduce_`."""
        result: MeshTensor = self._above.reduce_(self, dims, reduction, scatter=scatter)
        return result

    def slice_mesh(self, **selection: int | slice) -> MeshTensor:
        """Return the tensor on some of its ranks: `t.slice_mesh(gpus=0)`. No data moves.

        The result shares memory with this tensor: in-place writes to either show in both. The gradient is zero on the
        ranks that are left out.

        Args:
            **selection: As for `ProcMesh.slice`: a number removes its dimension, a slice keeps a part of it.

        Raises:
            ShapeError: The tensor has no such ranks.
            TypeError: The tensor is global: its ranks have parts of one tensor.
        """
        sliced: MeshTensor = self._above.slice_mesh(self, **selection)
        return sliced

    def to_mesh(self, target: ProcMesh) -> MeshTensor:
        """Return a copy on other ranks: of a view of the same processes, or of another mesh of this controller.

        Each rank's tensor is copied to the rank at the same place; a tensor of one rank is copied to all. A global
        tensor can move to any extent: it is cut along the same labels as here, if the target has them, and each rank
        reads the parts that it needs. Data moves directly between the ranks' processes. If the tensor could not be
        computed at the source, the target gets the same error. Differentiable: gradients move back, and gradients of
        the copies of one rank's tensor are summed.

        Args:
            target: The processes.

        Raises:
            ShapeError: The sizes of the two differ, and the source is not one rank; or the tensor is global, and ranks
                of the target are missing in its extent.
            TypeError: `target` is not a mesh of processes.
            ProcDied, MeshStopped: A process of either mesh has ended, or the mesh was stopped.
        """
        moved: MeshTensor = self._above.to_mesh(self, target)
        return moved

    def local(self, placements: Sequence[Cut] | None = None) -> MeshTensor:
        """Return the parts of a global tensor as a local tensor on each rank. Not differentiable.

        Partial sums are reduced; otherwise no data moves. For the whole tensor on each rank, or for other parts, write
        `trimesh.redistribute(t, [...]).local()`.

        Args:
            placements: Current placements of the tensor, as for `trimesh.distribute`, or, where ranks have the whole,
                how to cut it; parts must be equal. If a rank lacks its part, fetching the result raises. None: use the
                current placements, which are queried from the ranks.

        Raises:
            ShapeError: The placements do not fit the tensor, or its parts would not be equal.
            TypeError: The tensor is not global, or it needs gradients.
            MeshErrorGroup: The ranks were queried, and the tensor could not be computed.

        Blocking: with `placements`, never; without, until the ranks have answered, and no other task runs meanwhile.
        """
        made: MeshTensor = self._above.to_local(self, placements)
        return made

    def to_global(self, placements: Sequence[Cut] | None = None) -> MeshTensor:
        """Return one global tensor whose parts are the tensors of the ranks. Not differentiable.

        Args:
            placements: Placements of the global tensor, as for `trimesh.distribute`. Ranks that hold the same part must
                have the same values; this is not checked.

        Raises:
            ShapeError: The placements do not fit the tensor.
            TypeError: The tensor is already global, or it needs gradients.
        """
        made: MeshTensor = self._above.to_global(self, placements)
        return made

    # ---- values: these block (rule N2) -----------------------------------------------------------------------

    def tolist(self) -> Any:
        """Return the values as lists, as `torch.Tensor.tolist`. Blocks; raises if ranks have different values."""
        return self._above.list_now(self)

    def __str__(self) -> str:
        """Return the values as text, for `print`. Blocks; `repr(t)` does not."""
        text: str = self._above.text_now(self)
        return text

    def __format__(self, spec: str) -> str:
        """Return the values as text; a single number with a format spec is formatted as a number. Blocks."""
        text: str = self._above.formatted_now(self, spec)
        return text

    # ---- unsupported: no memory here -------------------------------------------------------------------------

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
        """Refuse: a pickle would outlive the tensor on the ranks."""
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
    """Return a handle on the tensor that the ranks of a team have, or will have, under a ref."""
    made = meta.new_handle()
    made._meta = meta
    made._held = Held(team, ref)
    return made


def make_held(meta: Meta, held: Held) -> MeshTensor:
    """Return another handle on a tensor that is held."""
    made = meta.new_handle()
    made._meta = meta
    made._held = held
    return made


# ---- lending ---------------------------------------------------------------------------------------------------------

# Mesh tensors as arguments of endpoints: each actor gets the tensor of the rank in its own process.


class _Loan(Guarded):
    """Holds a tensor on the ranks until the call with this argument has ended."""

    def __init__(self, tensor: MeshTensor) -> None:
        self._held = tensor._held
        self._text = repr(tensor)

    def check(self, peers: AbstractSet[object], *, is_broadcast: bool) -> None:
        if is_broadcast:
            raise TypeError(
                "broadcast must not take mesh tensors, as it does not learn when the endpoint is done with them, got "
                f"{self._text}: write `await ep.call(...)`"
            )
        strangers = peers - set(self._held.team.peers)
        if strangers:
            raise TypeError(
                f"actors that get a mesh tensor must live in the processes of its ranks, got {self._text} for actors "
                f"of which {len(strangers)} live in other processes: write t.to_mesh(their processes), or send the "
                "value, `await trimesh.fetch(t)`"
            )


def reduce_tensor(tensor: MeshTensor, sink: Sink) -> Any:
    """Encode a mesh tensor for the actors in the processes of its ranks."""
    if tensor._meta.is_global:
        raise TypeError(
            f"an endpoint must get a tensor on each rank, not a global one, got {tensor!r}: write t.local(), or use a "
            "function under @trimesh.remote, which gets a DTensor"
        )
    team = tensor._held.team
    team.check()
    team.engine.flush_team(team)  # send the commands that compute it before the call
    sink.attach(_Loan(tensor))
    engine = team.engine
    return rebuild, (TENSORS, engine.proc.proc_id, engine.number, team.number, team.issued, tensor._held.ref)


# ---- tensors whose shape was changed in place, and views of them that autograd would differentiate wrongly -----------

# After a write to a view, or to its base, autograd regenerates the history of the view. For ordinary tensors it uses
# their strides; for handles it repeats the view operations on the base. The result is another view if the shape of the
# base or of the view was changed in place since.

_CHANGED: Final[Any] = WeakIdKeyDictionary()

NOTE: Final = "a view taken before its base changed shape in place (t_, unsqueeze_) is made again from the new shape"
"""Note on an error that such a view may have caused."""


@attrs.frozen
class _Change:
    """Last in-place change of the shape of a tensor, or of one of its views.

    Attributes:
        ref: Tensors with a lower ref existed before the change.
        version: Version of the memory after it; -1 if views regenerate their histories even without a later write.
        is_moved: Whether any change may have moved to another offset or to other memory.
    """

    ref: int
    version: int
    is_moved: bool


def note_change(tensor: MeshTensor, *, version: int, is_moved: bool) -> None:
    """Record that the shape of a tensor was changed in place."""
    base = tensor if tensor._base is None else tensor._base
    before = _CHANGED.get(base)
    _CHANGED[base] = _Change(tensor._held.ref, version, is_moved or (before is not None and before.is_moved))


has_changed_bases: Final[Callable[[], int]] = _CHANGED.data.__len__
"""Returns whether there are any."""


def is_changed_base(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value in _CHANGED


def check_views(name: str, tensors: Sequence[MeshTensor], written: Collection[int] = ()) -> None:
    """Refuse an operation on a view that autograd would differentiate wrongly.

    Args:
        name: Name of the operation.
        tensors: Its tensors.
        written: Indices of the tensors that it writes to.

    Raises:
        RuntimeError: There is such a view among the tensors.
    """
    for place, tensor in enumerate(tensors):
        base = tensor._base
        change: _Change | None = None if base is None else _CHANGED.get(base)
        if base is None or change is None or not any(one.requires_grad for one in (base, *tensors)):
            continue
        is_current = tensor._held.ref >= change.ref and base._version == change.version
        if (is_current and place not in written) or (not change.is_moved and _is_made_again(tensor, base)):
            continue
        raise RuntimeError(
            f"gradients follow a view only while it and its base keep their shapes, got {name} of {tensor!r}, a view "
            f"of {base!r}, one of which was changed in place (t_, transpose_, unsqueeze_, ...): write the operation "
            "that returns a new tensor (base = base.t()), or take the view again"
        )


def _is_made_again(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether repeating the view operations on the current base gives the same view."""
    with no_dispatch(), torch.no_grad():
        plain = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device="meta")
        try:
            made: torch.Tensor = view._view_func_unsafe(plain)
        except RuntimeError:  # the base has too few dimensions for it
            return False
    return made.size() == view.size() and made.stride() == view.stride()
