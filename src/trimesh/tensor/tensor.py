"""`MeshTensor`: what looks like a tensor at the controller and is one on every rank of a team."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimesh.tensor.placement import Cut
    from trimesh.tensor.shapes import Meta
    from trimesh.tensor.team import Team


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

    def __del__(self) -> None:
        self.team.free(self.ref)


class MeshTensor(torch.Tensor):
    """A tensor on the ranks of a mesh. Made by torch's own functions, never by its class.

    Attributes:
        _meta: Its looks.
        _held: Where it is.
    """

    _meta: Meta
    _held: Held
    _issue: ClassVar[Any]  # set by `issue`, which needs this class

    __slots__ = ("_held", "_meta")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the ranks: see `issue`."""
        del types
        return cls._issue(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is without asking the ranks; `str(t)` and `print(t)` ask them."""
        del tensor_contents
        meta, team = self._meta, self._held.team
        kind = "global tensor" if meta.is_global else "tensor"
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(meta.dtype).removeprefix("torch.")
        return f"<{kind} {dtype}{list(meta.size)} on {team.name}{grad}>"

    def local(self, placements: Sequence[Cut] | None = None) -> torch.Tensor:
        """Return, of a global tensor, each rank's part as a tensor on each rank. Not differentiable.

        Args:
            placements: How it is cut, as `trimesh.distribute` takes it; parts must be equal. None: each has the whole.

        Raises:
            ShapeError: The placements do not fit the tensor, or its parts would not be equal.
            TypeError: It is no global tensor, or it needs gradients.
        """
        from trimesh.tensor.global_tensor import to_local  # noqa: PLC0415 - which needs this class

        return to_local(self, placements)

    def to_global(self, placements: Sequence[Cut] | None = None) -> torch.Tensor:
        """Return one global tensor that has the tensors of the ranks as its parts. Not differentiable.

        Args:
            placements: How it is cut, as `trimesh.distribute` takes it. Ranks whose part is the same have the same
                values; nobody checks.

        Raises:
            ShapeError: The placements do not fit the tensor.
            TypeError: It is global, or it needs gradients.
        """
        from trimesh.tensor.global_tensor import to_global  # noqa: PLC0415 - which needs this class

        return to_global(self, placements)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the values are on the ranks."""
        del force
        raise TypeError(f"{self!r} has its values on the ranks: write `(await trimesh.fetch(t)).numpy()`")

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Refuse, as `numpy` does."""
        del dtype
        self.numpy()

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory here."""
        raise TypeError(f"{self!r} has its memory on the ranks, so it has no pointer at the controller")


def make(meta: Meta, team: Team, ref: int) -> MeshTensor:
    """Return the handle on a tensor that the ranks of a team have, or will have, under a number."""
    made: MeshTensor = torch.Tensor._make_wrapper_subclass(
        MeshTensor, meta.size, strides=meta.stride, dtype=meta.dtype, device=meta.device
    )
    made._meta = meta
    made._held = Held(team, ref)
    return made
