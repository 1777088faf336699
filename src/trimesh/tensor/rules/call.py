"""One operator call on global tensors, in the form that rules take: arguments by name, tensors as metadata."""

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
        index: Position among the tensors of the call.
        size, stride, dtype: As torch's.
        cuts: Placements, one for each mesh dimension; () for a result.
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
        """Return whether collectives can add this dtype, so that ranks may hold partial sums of it."""
        return self.dtype in _SUMMED


_SUMMED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}
)


class Strategy(NamedTuple):
    """One way to run a call along one dimension of the mesh.

    Attributes:
        args: Required cut of each tensor of the call.
        results: Resulting cut of each result tensor.
    """

    args: tuple[int, ...]
    results: tuple[int, ...]


@attrs.frozen(eq=False)
class Chosen:
    """The placements of all tensors of a call while it runs, along all dimensions of the mesh.

    Attributes:
        args, results: Placements of each tensor.
        mesh: Size of each dimension of the mesh.
        place: This rank's coordinates.
        device_mesh: Torch's device mesh.
    """

    args: Sequence[Cuts]
    results: Sequence[Cuts]
    mesh: Sequence[int]
    place: Sequence[int]
    device_mesh: Any

    def part(self, meta: GlobalMeta) -> tuple[list[int], list[int]]:
        """Return the start and the size of this rank's part of an argument."""
        return local_part(meta.size, self.args[meta.index], self.mesh, self.place)

    def result_size(self, number: int, meta: GlobalMeta) -> list[int]:
        """Return the size of this rank's part of a result."""
        return local_part(meta.size, self.results[number], self.mesh, self.place)[1]


@attrs.define(eq=False)
class OperatorCall:
    """An operator call with its arguments bound to the names of the schema.

    Attributes:
        operator: An `OpOverload`.
        name: Its name without overload; for an in-place operator (`add_`), the name of its functional form (`add`).
        arguments: Arguments by name; a `GlobalMeta` replaces each tensor.
        metas: Metadata of the tensors, in order.
        written: Indices of the tensors that it writes to.
        is_in_place: Whether its name marks it as in-place (`add_`).
        mesh: Size of each dimension of the mesh.
        leaves: Leaves of the result: metadata of tensors, None for other values.
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
        """Metadata of the first tensor that the call returns."""
        return self.results[0]

    def dim(self, name: str, ndim: int, default: int = 0) -> int:
        """Return a dimension argument as a non-negative number."""
        dim = self.arguments.get(name)
        dim = default if dim is None else dim
        return dim % ndim if ndim else 0

    def dims(self, name: str, ndim: int) -> list[int]:
        """Return an argument of several dimensions as non-negative numbers; all dimensions if it is None or empty."""
        found = self.arguments.get(name)
        if found is None or (isinstance(found, list | tuple) and not found):
            return list(range(ndim))
        found = [found] if isinstance(found, int) else found
        return sorted({dim % ndim if ndim else 0 for dim in found} if ndim else set())

    def of(self, name: str) -> list[GlobalMeta]:
        """Return the metadata of all tensors in an argument: none, one or those of a list."""
        return list(metas_in(self.arguments.get(name)))

    def strategy(self, args: dict[int, int], results: Sequence[int], *, default: int = -1) -> Strategy:
        """Return a strategy from cuts by tensor index; tensors that `args` omits get `default` (replicated)."""
        return Strategy(tuple(args.get(index, default) for index in range(len(self.metas))), tuple(results))

    def is_sum(self, meta: GlobalMeta, dim: int) -> bool:
        """Return whether ranks hold partial sums of a tensor along a dimension of the mesh."""
        return meta.cuts[dim] == SUM


def metas_in(tree: Any) -> Iterator[GlobalMeta]:
    """Yield the metadata in an argument, in order."""
    if isinstance(tree, GlobalMeta):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from metas_in(one)


def localized(call: OperatorCall, **changes: Any) -> Callable[..., Any]:
    """Return the operator with some non-tensor arguments replaced by this rank's values."""
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


# ---- rows of the table: operators and how they run on parts ----------------------------------------------------------

Offer = Callable[[OperatorCall, int], Iterable[Strategy]]
"""Yields strategies to run a call along a dimension of the mesh, besides the fully replicated one."""

Localize = Callable[[OperatorCall, Chosen], Callable[..., Any] | None]
"""Returns the function that a rank calls with its parts; None for the operator itself."""


@attrs.frozen(eq=False)
class Row:
    """A row of the table: operators that share one rule.

    Attributes:
        kind: Title of the row in the printed table.
        names: Operator names without overload; `x` includes `x_`.
        offer: See `Offer`.
        cut: Text for the printed table: dimensions that may be cut.
        sums: Text for the printed table: which arguments may be partial sums, and which results are.
        localize: See `Localize`.
        is_view: Whether results share the memory of the first argument.
        numbers_vary: Whether the rule does not depend on numeric arguments, as long as no tensor is a partial sum.
        takes_empty: Whether parts of ranks may be empty.
        may_run: Predicate: whether the rule applies to a call.
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
    """Split a text of names at white space."""
    return tuple(text.split())


# ---- arguments of operators and their schemas ------------------------------------------------------------------------


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
    """Return arguments with global tensors replaced, in order, by the values of an iterator."""
    if is_global(tree):
        return next(parts)
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(part, parts) for part in tree])
    if isinstance(tree, dict):
        return {name: replaced(part, parts) for name, part in tree.items()}
    return tree


def key_of(tree: Any, *, vary: bool) -> Any:
    """Return the cache key of arguments: positions of tensors, types and values of all else (only types if `vary`)."""
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
    """Bind arguments to the names of the operator's schema."""
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
    """Return the name of an operator without overload; for an in-place operator, the name of its functional form."""
    name: str = operator._schema.name.partition("::")[2]
    if name.startswith("__"):
        return name
    return name.rstrip("_")


def _writes(operator: Any) -> Iterator[tuple[int, Any]]:
    for place, one in enumerate(operator._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield place, one


def has_out(operator: Any) -> bool:
    """Return whether an operator has `out=` arguments."""
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


# ---- global tensors assembled from local parts, and parts sliced from whole tensors ----------------------------------


def spec_of(mesh: Any, cuts: Cuts, meta: GlobalMeta) -> Any:
    """Return the `DTensorSpec` of a global tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    known = TensorMeta(torch.Size(meta.size), meta.stride, meta.dtype)
    return DTensorSpec(mesh, placements_of(cuts), tensor_meta=known)


def assembled(local: Any, made: Any, leaves: Sequence[DTensor]) -> Any:
    """Return one leaf of a result, built as `OperatorWay.made` describes it."""
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
    """Return a global tensor with this rank's part and the metadata of `whole`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - see `sharding`

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.size(), whole.stride(), whole.dtype))
    return global_tensor(local, spec)


def joined(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a tensor that every rank holds whole as a replicated global tensor."""
    if is_global(value):
        return value
    return made_of(value, like.device_mesh, placements_of((WHOLE,) * len(like.placements)), value)


def own_part(whole: torch.Tensor, like: DTensor, cuts: Cuts) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank holds whole."""
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
    """Return this rank's part under the target placements if slicing suffices; None if data must be sent."""
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
    """Infer metadata of an operator's results on fake tensors, and the argument index of each result that is one."""

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
