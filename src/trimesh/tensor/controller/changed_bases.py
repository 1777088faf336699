"""Tensors whose shape was changed in place, and views of them that gradients cannot follow any more.

When a view, or what it is a view of, has been written to, autograd finds the history of the view anew. For tensors that
have memory of their own it does so by their strides; for handles it makes the view again of its base. That is another
view where the shape of the base, or that of the view, was changed in place since.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from trimesh.tensor.controller.tensor import MeshTensor

_CHANGED: Final[Any] = WeakIdKeyDictionary()

NOTE: Final = "a view that was taken before the shape of its base was changed in place (t_, unsqueeze_) is made again"
"""On an error that may be of such a view."""


@attrs.frozen
class _Change:
    """The last change of the shape of a tensor, or of one of its views.

    Attributes:
        ref: Tensors with a lower one were there before.
        version: Of the memory, after it; -1 if views find their histories anew even so.
        is_moved: Whether any change may have been to another place of the memory, or to other memory.
    """

    ref: int
    version: int
    is_moved: bool


def note_change(tensor: MeshTensor, *, version: int, is_moved: bool) -> None:
    """Remember that the shape of a tensor was changed in place."""
    base = tensor if tensor._base is None else tensor._base
    before = _CHANGED.get(base)
    _CHANGED[base] = _Change(tensor._held.ref, version, is_moved or (before is not None and before.is_moved))


def has_changed_bases() -> bool:
    return bool(_CHANGED.data)


def is_changed_base(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value in _CHANGED


def check_views(name: str, tensors: Sequence[MeshTensor], written: Collection[int] = ()) -> None:
    """Refuse an operation on a view that gradients cannot follow.

    Args:
        name: Of the operation.
        tensors: What it is given.
        written: Places among them that it writes to.

    Raises:
        RuntimeError: There is such a view among them.
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
    """Whether the same steps make the same view of a base as it is now."""
    with no_dispatch(), torch.no_grad():
        plain = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device="meta")
        try:
            made: torch.Tensor = view._view_func_unsafe(plain)
        except RuntimeError:  # the base has too few dimensions for it
            return False
    return made.size() == view.size() and made.stride() == view.stride()
