"""Metadata of tensors on the ranks, cached plans of operations, and forms of answers, at the controller.

Shapes and dtypes come from torch's fake tensors when an operation first occurs with arguments of a signature; a `Plan`
caches them. Numbers that cannot change a shape are operands of the command, not part of the cache key, so that a loop
with a new learning rate in each step hits the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.tensor.controller.recording import Recorder
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.arguments import unpack
from trimesh.tensor.protocol.messages import kinds_of
from trimesh.tensor.protocol.placement import Box
from trimesh.tensor.protocol.tracing import quiet
from trimesh.tensor.rank.function_parts import LocalMeta, Operand

Line = tuple[CodeType, int]
"""Line that issued a command: code object and line number."""

FRESH: Final = -1
"""Leaf of a result that is a new tensor; other leaves are an argument or a value."""


@attrs.frozen(eq=False)
class Meta:
    """Metadata of a tensor. Equal metadata is the same object, so compare by identity.

    Attributes:
        size, stride, dtype, device: As in torch.
        is_global: Whether the ranks hold parts of one tensor, rather than a tensor each.
        new_handle: Makes a tensor of this metadata without data, to be given a ref.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_global: bool = False
    new_handle: Callable[[], MeshTensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # By place, as torch takes 0.3 us longer for arguments by name.
        new_handle = partial(
            torch.Tensor._make_wrapper_subclass,
            MeshTensor, self.size, self.stride, None, None, self.dtype, torch.strided, self.device,
        )  # fmt: skip
        object.__setattr__(self, "new_handle", new_handle)


MIXED_BITS: Final = 28
"""Bits of `Plan.mixed`: as many as Python computes with fast."""
_MIXER: Final = 0x9E37_79B9_7F4A_7C15


@attrs.frozen(eq=False)
class Plan:
    """Cached plan of one operation with arguments of one signature.

    Attributes:
        number: Number that its commands begin with.
        name: Name of the operator.
        description: Definition that is sent to ranks.
        metas: Metadata of the new tensors.
        leaves: For each leaf of the result: `FRESH`, or the index of a tensor among the arguments, or a value.
        tree: Structure of the result.
        has_alias: By leaf, whether it is an index.
        single: If the result is one tensor: `FRESH`, or its index among the arguments; else None.
        counted: Indices of tensors that it writes to without torch counting the write in their version.
        kinds: "r", "n" or "b" for each operand of its commands.
        mixed: Bits of the number, mixed; see `Team`.
    """

    number: int
    name: str
    description: list[Any]
    metas: Sequence[Meta]
    leaves: Sequence[Any]
    has_alias: Sequence[bool]
    tree: pytree.TreeSpec
    single: int | None = None
    counted: Sequence[int] = ()
    kinds: str = attrs.field(init=False)
    mixed: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        _, args, kwargs, *_ = self.description
        object.__setattr__(self, "kinds", kinds_of(args) + kinds_of(kwargs))
        object.__setattr__(self, "mixed", self.number * _MIXER >> 36 & (1 << MIXED_BITS) - 1)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Shapes:
    """Plans and metadata of one process.

    Attributes:
        recorder: Records all commands while a function is being recorded.
        fake: Makes the fake tensors.
        plans: Plans, by operation and metadata of its arguments.
        generation: Number of times that the plans were dropped.
        refs: First ref that no mesh of this process has used.
    """

    recorder: Recorder | None = None
    fake: FakeTensorMode = attrs.field(factory=FakeTensorMode)
    plans: dict[tuple[Any, ...], Plan] = attrs.field(factory=dict[tuple[Any, ...], Plan])
    generation: int = 0
    refs: int = 1
    _numbers: int = 0
    _metas: dict[tuple[Any, ...], Meta] = attrs.field(factory=dict[tuple[Any, ...], Meta])

    def new_number(self) -> int:
        """Return a number for a plan, a team or a request, unique in this process."""
        self._numbers += 1
        return self._numbers

    def new_numbers(self, count: int) -> int:
        """Return the first of `count` such numbers."""
        first = self._numbers + 1
        self._numbers += count
        return first

    def meta(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_global: bool = False,
    ) -> Meta:
        """Return the one object for this metadata."""
        key = (tuple(size), tuple(stride), dtype, device, is_global)
        found = self._metas.get(key)
        if found is None:
            found = self._metas[key] = Meta(*key)
        return found

    def meta_of(self, tensor: torch.Tensor, *, is_global: bool = False) -> Meta:
        """Return the metadata of a tensor, fake or not."""
        return self.meta(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, is_global=is_global)

    def example(self, meta: Meta) -> torch.Tensor:
        """Return a fake tensor with this metadata."""
        with self.fake:
            return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=meta.device)

    def remember(self, key: tuple[Any, ...], plan: Plan) -> None:
        """Cache a plan. If there are too many, drop all of them here, and on the ranks with their next commands."""
        if len(self.plans) >= limits.TENSOR_PLANS:
            self.plans.clear()
            self.generation += 1
        self.plans[key] = plan

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors."""
        with quiet(), self.fake, torch.no_grad():
            return function(*args, **kwargs)


# ---- `Expected`: the form of valid answers to a request. Any other answer violates the protocol ----------------------


@attrs.frozen
class Expected:
    """Form of an answer.

    Attributes:
        what: Description, for errors.
        is_form: Returns whether a value, from the rank at a place, has this form.
        is_ours: Whether answers hold no objects of users, so that undecodable bytes violate the protocol.
        metas: Metadata of the tensors, if the answer may be packed tensors.
    """

    what: str
    is_form: Callable[[Any, int], bool]
    is_ours: bool = True
    metas: Sequence[Meta] | None = None

    def fits(self, value: Any, place: int) -> bool:
        """Return whether a value has this form; False if an object of an unknown class raises."""
        try:
            return self.is_form(value, place)
        except Exception:  # noqa: BLE001
            return False

    def unpacked(self, data: bytes) -> list[torch.Tensor]:
        """Unpack tensors.

        Raises:
            ProtocolError: The data does not have this form.
        """
        if self.metas is None:
            raise ProtocolError(f"a rank must answer with {self.what}, got packed tensors")
        try:
            return unpack(data, [(meta.size, meta.dtype) for meta in self.metas])
        except ValueError as error:
            raise ProtocolError(f"a rank must answer with {self.what}, got {len(data)} bytes: {error}") from error


ANYTHING: Final = Expected("any value", lambda _value, _place: True, is_ours=False)
"""Result of a function of the user's."""

ONE_TENSOR: Final = Expected("a tensor", lambda value, _place: isinstance(value, torch.Tensor))

LARGE: Final = Expected(
    "the parts of tensors that it has", lambda value, _place: type(value) in (list, tuple) and len(value) == 3
)
"""Answers that `gathered` requests, and checks further."""

RNG_STATE: Final = Expected("the bytes of generators", lambda value, _place: _is_bytes(value))

FALLBACKS: Final = Expected(
    "the counts of its operators",
    lambda value, _place: (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is dict
        and all(type(name) is str and type(count) is int for name, count in value[0].items())
        and type(value[1]) is int
    ),
)

TRAFFIC: Final = Expected(
    "the counts of its collectives",
    lambda value, _place: _is_list(
        value,
        lambda one: _is_list(one, lambda _: True, 4) and [type(part) for part in one] == [str, str, int, int],
    ),
)

CLOCK: Final = Expected(
    "the boot id and the clock of its machine",
    lambda value, _place: type(value) is tuple and [type(part) for part in value] == [str, int],
)

PROFILE: Final = Expected("the rows of a profile", lambda value, _place: _is_profile(*value))

WRITTEN: Final = Expected(
    "the parts of tensors that it has written, with their files",
    lambda value, _place: _is_list(value, lambda one: _is_list(one, lambda _: True, 6) and _is_stored(*one)),
)

READ: Final = Expected("the number of tensors that it has read", lambda value, _place: type(value) is int)

RESULTS: Final = Expected(
    "the metadata of results, and the structure of the whole result",
    lambda value, _place: (
        type(value) is tuple
        and len(value) == 2
        and _is_list(value[0], _is_meta)
        and _places_in(value[1]) == list(range(len(value[0])))
    ),
    is_ours=False,
)
"""Answers of `function_inspect`; results may be parts of an object of the user's."""


def tensors_like(metas: Sequence[Meta], *, only_first: bool = False) -> Expected:
    """Expect a tensor for each of some metadata; with `only_first`, from the first rank only."""

    def is_form(value: Any, place: int) -> bool:
        wanted: Sequence[Meta] = [] if only_first and place else metas
        return _is_list(value, lambda one: isinstance(one, torch.Tensor), len(wanted)) and all(
            tuple(one.size()) == meta.size and one.dtype is meta.dtype for one, meta in zip(value, wanted, strict=True)
        )

    packed = None if only_first else metas
    return Expected(f"{len(metas)} tensors of the metadata that was announced", is_form, metas=packed)


def layout_along(dims: int) -> Expected:
    """Expect, for each dimension of a device mesh, the tensor dimension cut along it, and the pending reduction."""
    return Expected(
        "the placements of a tensor, in two lists",
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
    """Return the indices of the tensors in a result that was taken apart, and its other leaves."""
    leaves = (one for one in pytree.tree_leaves(parts) if one is not None)
    return [one.index if isinstance(one, Operand) else one for one in leaves]


# ---- `ShardOf`: a part of a tensor in this process, with its place in the whole --------------------------------------


class ShardOf:
    """A rectangular part of a larger tensor: `ShardOf(weight, size=(4096, 1024), start=(1024, 0))`.

    Args:
        tensor: The part, in this process.
        size: Size of the whole tensor.
        start: First index of the part in each dimension.
        is_first: Whether this process publishes the part; exactly one of its replicas must.

    Raises:
        TypeError: `tensor` is not a tensor of this process.
        ValueError: The part does not lie within the whole.

    Attributes:
        tensor: As given.
        size: As given.
        box: Indices of the part in the whole.
        is_first: As given.
    """

    __slots__ = ("box", "is_first", "size", "tensor")

    def __init__(
        self, tensor: torch.Tensor, *, size: Sequence[int], start: Sequence[int], is_first: bool = True
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, MeshTensor):
            raise TypeError(f"a part of a published tensor must be a tensor of this process, got {tensor!r:.100}")
        part = tuple(tensor.size())
        fits = len(part) == len(size) == len(start) and all(
            0 <= begin <= begin + length <= most for begin, length, most in zip(start, part, size, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a part must lie within the whole, {tuple(size)}, got {part} that starts at {tuple(start)}"
            )
        self.tensor = tensor
        self.size = tuple(size)
        self.box = Box(tuple(start), part)
        self.is_first = is_first

    def __repr__(self) -> str:
        return f"<part of {self.size}: {self.box.size} from {self.box.start} on>"


def shard_of(value: Any) -> ShardOf:
    """Convert a value to a `ShardOf`: a `ShardOf` itself, a `DTensor`, or a whole tensor.

    Raises:
        TypeError: The value is none of these; or it is a `DTensor` with partial sums (`Partial`), or one whose local
            part is not one box.
    """
    if isinstance(value, ShardOf):
        return value
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        return _of_dtensor(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a published value must be a tensor, a ShardOf or a DTensor, got {value!r:.100}")
    return ShardOf(value, size=value.size(), start=(0,) * value.dim())


def _of_dtensor(value: Any) -> ShardOf:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TypeError("a DTensor must be published by a rank of its device mesh, got one of other ranks")
    box, is_first = Box.of_all(value.size()), True
    for dim, (placement, place) in enumerate(zip(value.placements, coordinate, strict=True)):
        kind = type(placement).__name__
        if kind == "Shard":
            box = box.cut(placement.dim, mesh.size(dim), place)
        elif kind == "Replicate":
            is_first = is_first and place == 0
        else:
            raise TypeError(
                f"a published DTensor must be sharded or replicated, got {placement}: redistribute it first"
            )
    local = value.to_local()
    if tuple(local.size()) != box.size and math.prod(local.size()):
        raise TypeError(
            f"a DTensor must be cut as torch.chunk cuts, {box.size} on this rank, got {tuple(local.size())}"
        )
    return ShardOf(local.reshape(box.size), size=value.size(), start=box.start, is_first=is_first)
