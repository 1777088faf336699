"""One call of an operator on global tensors, as the rules see it: named arguments, with metadata for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import attrs
import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.protocol.tracing import traced
from trimesh.tensor.rank.kernel import global_tensor
from trimesh.tensor.rules.cuts import SUM, Cuts, local_part, part_of, placements_of
from trimesh.tensor.rules.sums import lies_so, ordered

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor


@attrs.frozen(eq=False)
class GlobalMeta:
    """A global tensor among the arguments of a call, or its results.

    Attributes:
        index: Its place among the tensors of the call.
        size, stride, dtype: As torch's.
        cuts: How it lies; of a result: ().
    """

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cuts: Cuts

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def numel(self) -> int:
        count = 1
        for length in self.size:
            count *= length
        return count

    @property
    def can_sum(self) -> bool:
        """Whether ranks may have parts of a sum of this dtype: those that a collective can add."""
        return self.dtype in _SUMMED


_SUMMED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}
)


class Strategy(NamedTuple):
    """One way to run a call along one dimension of the mesh.

    Attributes:
        args: For each tensor of the call, how it is to lie.
        results: For each tensor among the results, how it lies then.
    """

    args: tuple[int, ...]
    results: tuple[int, ...]


@attrs.frozen(eq=False)
class Chosen:
    """How the tensors of a call lie while it runs, along all dimensions of the mesh.

    Attributes:
        args, results: By tensor.
        mesh: Size of each dimension of the mesh.
        place: This rank's coordinates.
        device_mesh: Torch's.
    """

    args: Sequence[Cuts]
    results: Sequence[Cuts]
    mesh: Sequence[int]
    place: Sequence[int]
    device_mesh: Any

    def part(self, meta: GlobalMeta) -> tuple[list[int], list[int]]:
        """Return where this rank's part of an argument starts, and its size."""
        return local_part(meta.size, self.args[meta.index], self.mesh, self.place)

    def result_size(self, number: int, meta: GlobalMeta) -> list[int]:
        """Return the size of this rank's part of a result."""
        return local_part(meta.size, self.results[number], self.mesh, self.place)[1]


@attrs.define(eq=False)
class OperatorCall:
    """A call, taken apart.

    Attributes:
        operator: An `OpOverload`.
        name: Of it, without overload; of one that writes to its first argument, that of the one that does not.
        arguments: By name; a `GlobalMeta` in the place of each tensor.
        metas: Of the tensors, in order.
        written: Which of them it writes to.
        is_in_place: Whether it is named for writing to its first argument.
        mesh: Size of each dimension of the mesh.
        leaves: What it returns: metadata, and None for what is no tensor.
    """

    operator: Any
    name: str
    arguments: dict[str, Any]
    metas: list[GlobalMeta]
    written: frozenset[int]
    is_in_place: bool
    mesh: Sequence[int]
    leaves: list[GlobalMeta | None]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def results(self) -> list[GlobalMeta]:
        return [one for one in self.leaves if one is not None]

    @property
    def result(self) -> GlobalMeta:
        """The first tensor that it returns."""
        return self.results[0]

    def dim(self, name: str, ndim: int, default: int = 0) -> int:
        """Return an argument that numbers a dimension, from the front."""
        dim = self.arguments.get(name)
        dim = default if dim is None else dim
        return dim % ndim if ndim else 0

    def dims(self, name: str, ndim: int) -> list[int]:
        """Return an argument that numbers dimensions, from the front; all if it is None or empty."""
        found = self.arguments.get(name)
        if found is None or (isinstance(found, list | tuple) and not found):
            return list(range(ndim))
        found = [found] if isinstance(found, int) else found
        return sorted({dim % ndim if ndim else 0 for dim in found} if ndim else set())

    def of(self, name: str) -> list[GlobalMeta]:
        """Return the tensors of an argument: none, one or those of a list."""
        return list(metas_in(self.arguments.get(name)))

    def strategy(self, args: dict[int, int], results: Sequence[int], *, default: int = -1) -> Strategy:
        """Return a strategy by the indices of tensors; those that are not named lie whole."""
        return Strategy(tuple(args.get(index, default) for index in range(len(self.metas))), tuple(results))

    def is_sum(self, meta: GlobalMeta, dim: int) -> bool:
        """Whether the ranks have parts of a sum of it along a dimension of the mesh."""
        return meta.cuts[dim] == SUM


def metas_in(tree: Any) -> Iterator[GlobalMeta]:
    """Yield the metadata in an argument, in order."""
    if isinstance(tree, GlobalMeta):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from metas_in(one)


def localized(call: OperatorCall, **changes: Any) -> Callable[..., Any]:
    """Return the operator with some of its arguments that are no tensors replaced by those of this rank."""
    names = [one.name for one in call.operator._schema.arguments]
    operator = call.operator

    def run(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for name, value in changes.items():
            at = names.index(name)
            if at < len(values):
                values[at] = value
            else:
                kwargs[name] = value
        return operator(*values, **kwargs)

    return run


# ---- one row of the table: some operators, and how they run on parts -------------------------------------------------

Offer = Callable[[OperatorCall, int], Iterable[Strategy]]
"""The ways to run a call along a dimension of the mesh, beside that with everything whole."""

Localize = Callable[[OperatorCall, Chosen], Callable[..., Any] | None]
"""What a rank calls with its parts, where that is not the operator itself."""


@attrs.frozen(eq=False)
class Row:
    """Operators of one kind.

    Attributes:
        kind: What the table calls them.
        names: Of the operators, without overload; `x` stands for `x_`, too.
        offer: See `Offer`.
        cut: What may be cut, in words.
        sums: What may be parts of a sum, and what becomes one, in words.
        localize: See `Localize`.
        is_view: Whether results share the memory of the first argument.
        numbers_vary: Whether numbers cannot change what the rule says of tensors that are not in parts.
        takes_empty: Whether ranks may have nothing of a tensor.
        may_run: Whether a call is one that the rule is for.
    """

    kind: str
    names: tuple[str, ...]
    offer: Offer
    cut: str
    sums: str = ""
    localize: Localize | None = None
    is_view: bool = False
    numbers_vary: bool = False
    takes_empty: bool = True
    may_run: Callable[[OperatorCall], bool] | None = None


def words(text: str) -> tuple[str, ...]:
    """Return names that are written in one text."""
    return tuple(text.split())


# ---- the arguments of an operator with global tensors among them, and what its schema says of them -------------------


def is_global(value: Any) -> TypeGuard[DTensor]:
    return isinstance(value, torch.Tensor) and hasattr(value, "_local_tensor")


def globals_in(tree: Any) -> list[DTensor]:
    """Return the global tensors in arguments, in order."""
    return [one for one in tensors_in(tree) if hasattr(one, "_local_tensor")]


def tensors_in(tree: Any) -> list[Any]:
    """Return the tensors in arguments, in order."""
    found: list[Any] = []
    _collect((tree,), found)
    return found


def _collect(values: Iterable[Any], found: list[Any]) -> None:
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            _collect(one, found)
        elif isinstance(one, dict):
            _collect(one.values(), found)


def replaced(tree: Any, parts: Iterator[Any]) -> Any:
    """Return arguments with other values in the place of global tensors, in order."""
    if is_global(tree):
        return next(parts)
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(part, parts) for part in tree])
    if isinstance(tree, dict):
        return {name: replaced(part, parts) for name, part in tree.items()}
    return tree


def key_of(tree: Any, *, vary: bool) -> Any:
    """Return what a way depends on of arguments that are no tensors, and where tensors are."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return (kind, *[key_of(one, vary=vary) for one in tree])
    if kind is dict:
        return tuple((name, key_of(one, vary=vary)) for name, one in tree.items())
    if vary and (kind is float or kind is int):
        return kind
    if kind is float or kind is complex:
        return kind, repr(tree)  # -0.0 equals 0.0, and nan nothing
    return torch.Tensor if is_global(tree) else (kind, tree)


def bound(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by their names in the schema."""
    found: dict[str, Any] = {}
    for place, one in enumerate(operator._schema.arguments):
        if place < len(args):
            found[one.name] = args[place]
        elif one.name in kwargs:
            found[one.name] = kwargs[one.name]
        else:
            found[one.name] = one.default_value
    return found


def plain_name(operator: Any) -> str:
    """Return the name of an operator without overload, and of one that writes to its argument that of the other."""
    name: str = operator._schema.name.partition("::")[2]
    if name.startswith("__"):
        return name
    return name.rstrip("_")


def _writes(operator: Any) -> Iterator[tuple[int, Any]]:
    for place, one in enumerate(operator._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield place, one


def has_out(operator: Any) -> bool:
    """Whether an operator writes to tensors that are given only for that."""
    return any(one.kwarg_only for _, one in _writes(operator))


def written_in(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, DTensor]:
    """Return the global tensors that an operator writes to, by identity."""
    found: dict[int, DTensor] = {}
    names = {one.name: place for place, one in enumerate(operator._schema.arguments)}
    for place, one in _writes(operator):
        if one.name == "grads" and "grad_scale" in names and kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes to them only to scale them
        value = args[place] if place < len(args) else kwargs.get(one.name)
        for each in globals_in(value):
            found[id(each)] = each
    return found


def makes_views(operator: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in operator._schema.returns)


# ---- global tensors put together of the parts that the ranks have, and parts taken of what is whole ------------------


def spec_of(mesh: Any, cuts: Cuts, meta: GlobalMeta) -> Any:
    """Return what torch is to know of a global tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    known = TensorMeta(torch.Size(meta.size), meta.stride, meta.dtype)
    return DTensorSpec(mesh, placements_of(cuts), tensor_meta=known)


def assembled(local: Any, made: Any, leaves: Sequence[DTensor]) -> Any:
    """Return a leaf of a result: see `OperatorWay.made`."""
    if made is None or not isinstance(local, torch.Tensor):
        return local
    if isinstance(made, int):
        return leaves[made]
    spec, size, strides = made
    if local.size() != size or local.dtype is not spec.tensor_meta.dtype:
        raise RuntimeError(
            f"a part of {tuple(spec.shape)} by {spec.placements} must be {tuple(size)} of {spec.tensor_meta.dtype}, "
            f"got {tuple(local.size())} of {local.dtype}: a rule of the table is wrong"
        )
    if strides is not None and not lies_so(local, strides):
        local = torch.empty_strided(size, strides, dtype=local.dtype, device=local.device).copy_(local)
    return global_tensor(local, spec)


def made_of(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> DTensor:
    """Return the global tensor with the metadata of `whole` of which this rank has a part."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.size(), whole.stride(), whole.dtype))
    return global_tensor(local, spec)


def joined(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a tensor that every rank has as a global one."""
    if is_global(value):
        return value
    return made_of(value, like.device_mesh, placements_of((WHOLE,) * len(like.placements)), value)


def own_part(whole: torch.Tensor, like: DTensor, cuts: Cuts) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has."""
    mesh = like.device_mesh
    starts, lengths = local_part(
        whole.size(), cuts, [mesh.size(dim) for dim in range(mesh.ndim)], mesh.get_coordinate() or ()
    )
    if list(whole.size()) == lengths:
        return whole
    part = whole
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length != whole.size(dim):
            part = part.narrow(dim, start, length)
    return ordered(part.clone(), whole.size(), whole.stride())


def sliced_part(value: DTensor, cuts: Cuts, target: Cuts) -> torch.Tensor | None:
    """Return the own part of what is whole so far, if nothing has to be sent for it."""
    local = value._local_tensor
    for dim, (cut, want) in enumerate(zip(cuts, target, strict=True)):
        if cut == want:
            continue
        if cut != WHOLE or want < 0 or want in cuts[dim + 1 :]:
            return None
        mesh = value.device_mesh
        start, length = part_of(local.size(want), mesh.size(dim), mesh.get_local_rank(dim))
        local = local.narrow(want, start, length)
    return local


def metas_made(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[DTensor], fake: FakeTensorMode
) -> tuple[list[GlobalMeta | None], list[int | None]]:
    """Find out what an operator makes; and which of it are arguments, by their numbers."""

    def filled(fakes: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        parts = iter(fakes)
        return replaced(tuple(args), parts), replaced(kwargs, parts)

    result, fakes = traced(
        operator, [(one.size(), one.stride(), one.dtype, one.device) for one in leaves], filled, fake
    )
    metas: list[GlobalMeta | None] = []
    aliases: list[int | None] = []
    for one in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(one, torch.Tensor):
            metas.append(None)
            aliases.append(None)
            continue
        metas.append(GlobalMeta(len(metas), tuple(one.size()), tuple(one.stride()), one.dtype, ()))
        aliases.append(next((index for index, fake in enumerate(fakes) if fake is one), None))
    return metas, aliases
