"""`Expected`: what a request takes for an answer. Whatever else a rank sends breaks the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.tensor.rank.function_parts import LocalMeta, Operand

if TYPE_CHECKING:
    from trimesh.tensor.controller.plan import Meta


@attrs.frozen
class Expected:
    """The form of an answer.

    Attributes:
        what: For people.
        is_form: Whether a value that the rank at some place has sent has it.
        is_ours: Whether there is nothing of a user's in it, so that bytes that cannot be decoded break the protocol.
    """

    what: str
    is_form: Callable[[Any, int], bool]
    is_ours: bool = True

    def fits(self, value: Any, place: int) -> bool:
        """Return whether a value has this form; what is asked of an object of a stranger's class may raise."""
        try:
            return self.is_form(value, place)
        except Exception:  # noqa: BLE001
            return False


ANYTHING: Final = Expected("any value", lambda _value, _place: True, is_ours=False)
"""What a function of the user's has returned."""

ONE_TENSOR: Final = Expected("a tensor", lambda value, _place: isinstance(value, torch.Tensor))

LARGE: Final = Expected(
    "which parts of tensors it has", lambda value, _place: type(value) in (list, tuple) and len(value) == 3
)
"""What `gathering` asks for, and looks at more closely."""

RNG_STATE: Final = Expected("the bytes of generators", lambda value, _place: _is_bytes(value))

FALLBACKS: Final = Expected(
    "how often which operators ran",
    lambda value, _place: (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is dict
        and all(type(name) is str and type(count) is int for name, count in value[0].items())
        and type(value[1]) is int
    ),
)

TRAFFIC: Final = Expected(
    "which collectives it took part in",
    lambda value, _place: _is_list(
        value,
        lambda one: _is_list(one, lambda _: True, 4) and [type(part) for part in one] == [str, str, int, int],
    ),
)

CLOCK: Final = Expected(
    "the boot and the time of its machine",
    lambda value, _place: type(value) is tuple and [type(part) for part in value] == [str, int],
)

PROFILE: Final = Expected("what it has done, and when", lambda value, _place: _is_profile(*value))

WRITTEN: Final = Expected(
    "which parts of tensors it has written, and where",
    lambda value, _place: _is_list(value, lambda one: _is_list(one, lambda _: True, 6) and _is_stored(*one)),
)

READ: Final = Expected("how many tensors it has read", lambda value, _place: type(value) is int)

RESULTS: Final = Expected(
    "the metadata of results, and what they are parts of",
    lambda value, _place: (
        type(value) is tuple
        and len(value) == 2
        and _is_list(value[0], _is_meta)
        and _places_in(value[1]) == list(range(len(value[0])))
    ),
    is_ours=False,
)
"""What "inspect" asks for; the results may be parts of an object of the user's."""


def tensors_like(metas: Sequence[Meta], *, only_first: bool = False) -> Expected:
    """Expect a tensor for each of some metadata; with `only_first`, none from other ranks than the first."""

    def is_form(value: Any, place: int) -> bool:
        wanted: Sequence[Meta] = [] if only_first and place else metas
        return _is_list(value, lambda one: isinstance(one, torch.Tensor), len(wanted)) and all(
            tuple(one.size()) == meta.size and one.dtype is meta.dtype for one, meta in zip(value, wanted, strict=True)
        )

    return Expected(f"{len(metas)} tensors of the metadata that was announced", is_form)


def layout_along(dims: int) -> Expected:
    """Expect, for each dimension of a device mesh, which of a tensor is cut along it, and what is to be done to sum."""
    return Expected(
        "how a tensor lies, in two lists",
        lambda value, _place: (
            type(value) is tuple
            and len(value) == 2
            and _is_list(value[0], lambda one: type(one) is int, dims)
            and _is_list(value[1], lambda one: type(one) is str, dims)
        ),
    )


def metas_of(count: int) -> Expected:
    """Expect size, stride and dtype of some tensors."""
    return Expected(f"the metadata of {count} tensors", lambda value, _place: _is_list(value, _is_named_meta, count))


def _is_list(value: Any, fits: Callable[[Any], bool], length: int | None = None) -> bool:
    return type(value) is list and length in (None, len(value)) and all(map(fits, value))


def _is_sizes(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(one) is int and one >= 0 for one in value)


def _is_stored(index: Any, file: Any, offset: Any, length: Any, start: Any, size: Any) -> bool:
    return _is_sizes([index, offset, length]) and type(file) is str and _is_sizes(start) and _is_sizes(size)


def _is_profile(names: Any, rows: Any, missing: Any) -> bool:
    return (
        _is_list(names, lambda one: type(one) is str)
        and type(rows) is torch.Tensor
        and rows.dtype is torch.int64
        and rows.ndim == 2
        and rows.size(1) == 7
        and type(missing) is int
        and (not rows.numel() or (int(rows[:, 1].min()) >= 0 and int(rows[:, 1].max()) < len(names)))
    )


def _is_bytes(value: Any) -> bool:
    return type(value) is torch.Tensor and value.dtype is torch.uint8 and value.ndim == 1


def _is_named_meta(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 3:
        return False
    size, stride, dtype = value
    return (
        _is_sizes(size)
        and _is_sizes(stride)
        and len(size) == len(stride)
        and type(dtype) is str
        and isinstance(getattr(torch, dtype, None), torch.dtype)
    )


def _is_meta(value: Any) -> bool:
    return (
        type(value) is LocalMeta
        and _is_sizes(value.size)
        and _is_sizes(value.stride)
        and len(value.size) == len(value.stride)
        and isinstance(value.dtype, torch.dtype)
    )


def _places_in(parts: Any) -> list[Any]:
    """Return the places of the tensors in a result that was taken apart, and whatever else is a leaf of it."""
    leaves = (one for one in pytree.tree_leaves(parts) if one is not None)
    return [one.index if isinstance(one, Operand) else one for one in leaves]
