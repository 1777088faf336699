"""The operators of torch on global tensors, on the ranks: those of `DTensor`, and what it leaves to us.

- Random numbers: all ranks draw the same ones, for the whole tensor, from a generator that the team shares, and each
  keeps its part. So values do not depend on how a tensor lies, and replicas are equal. It costs every rank the time
  and, for a moment, the memory of the whole; torch's own way serves CUDA only, and its numbers depend on the layout.
- An operator that torch has no rule for gets all of its arguments whole, on every rank.
- A gradient of which the ranks have parts of a sum is added up once, by the first operation that needs it whole and
  could need it again, rather than by each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh.errors import CollectiveFailed
from trimesh.tensor.convolution import convolution, convolution_backward
from trimesh.tensor.copied_view import copied_views
from trimesh.tensor.kernel import FAMILIES, Kernel
from trimesh.tensor.random import generator_of
from trimesh.tensor.rank import Rank, TeamOnRank, memory_of
from trimesh.tensor.sharding import assemble, is_partial, settle, shard_of, unsummed, write_whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Operator = Callable[..., Any]

_LIKES: Final = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
_RANDOM: Final = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
        "normal", "normal_", "poisson", "random_", "rrelu_with_noise", "rrelu_with_noise_", "uniform_",
        "_sample_dirichlet", "_standard_gamma",
    }
)  # fmt: skip
_RESHAPES: Final = frozenset({"_unsafe_view", "view"})
_NORMS: Final = frozenset({"_foreach_norm", "linalg_vector_norm"})
"""Operators that are asked for the whole of a gradient before the optimizer is."""


def operator_on_globals(name: str, operator: Operator) -> Kernel:
    """Return what an operator is where its tensors are global."""
    schema = getattr(operator, "_schema", None)
    writes = _written(schema)
    compute = _computation(name.partition("::")[2].partition(".")[0], operator, writes)
    makes_views = not writes and schema is not None and any(one.alias_info is not None for one in schema.returns)

    def run(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        views = copied_views(rank)
        if views:
            for one in _globals((args, kwargs)):
                views.refresh(one)
        written = [one for write in writes for one in _globals(_argument(args, kwargs, write))]
        views.check(written)
        result = compute(rank, team, *args, **kwargs)
        if makes_views and _is_global(args[0]):
            rest = args[1:]
            views.made(
                args[0], list(_parts(result)), lambda base: list(_parts(compute(rank, team, base, *rest, **kwargs)))
            )
        elif writes and views:
            for one in written:
                views.written(one)
        return result

    return Kernel(name, run, takes_poison=False, operator=operator)


def _computation(base: str, operator: Operator, writes: Sequence[Write]) -> Operator:
    if base in _LIKES:
        return _like(_LIKES[base], takes_sizes=base == "randint_like")
    own = _OWN.get(base)
    if own is not None:
        return own
    if base in _RANDOM:
        return _random(operator, writes)
    if base in _RESHAPES:
        return _reshape(operator)
    # Before 2.13 torch adds a number to each part of a sum, and so to the sum as often as there are parts.
    return _plain(operator, writes, settles=bool(writes) or base in _NORMS or _RELEASE < (2, 13))


def _plain(operator: Operator, writes: Sequence[Write], *, settles: bool) -> Operator:
    def compute(rank: Rank, _team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        if next(_globals((args, kwargs)), None) is None:  # views of a whole tensor
            return operator(*args, **kwargs)
        if settles:
            _settle_inputs(args, kwargs, writes)
        if _RELEASE < (2, 13):  # later ones refuse to write so
            for one in _sums(args, kwargs, writes):
                _add_up(rank, one)
        call = operator if has_rule(operator) else _parts_of(operator, writes)
        try:
            if call is not None:
                return call(*args, **kwargs)
        except (CollectiveFailed, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if call is operator and not _is_refused(error):
                raise
        sums = _sums(args, kwargs, writes)
        for one in sums:
            _add_up(rank, one)
        if sums and call is operator:
            return operator(*args, **kwargs)
        return whole(operator, writes, args, kwargs)

    return compute


def _reshape(operator: Operator) -> Operator:
    plain = _plain(operator, (), settles=False)

    def reshape(rank: Rank, team: TeamOnRank, value: Any, size: Any) -> Any:
        if not _is_global(value) or isinstance(size, torch.dtype):
            return plain(rank, team, value, size)
        if _is_torn(value, size):
            return whole(operator, (), (value, size), {}, follows=True)
        try:
            return plain(rank, team, value, size)
        except RuntimeError as error:
            if _STRIDES not in str(error):
                raise
        # What this rank has lies otherwise than the whole would, of which the controller knows that this is a view.
        return plain(rank, team, _row_major(rank, value), size)

    return reshape


_STRIDES: Final = "view size is not compatible with input tensor's size and stride"


def _row_major(rank: Rank, value: DTensor) -> Any:
    if not _is_shared(rank, value):
        value._local_tensor = value._local_tensor.contiguous()
        return value
    made = torch.ops.aten.clone.default(value, memory_format=torch.contiguous_format)
    copied_views(rank).freeze(made)  # other ranks may have a view, so that all cannot take part in keeping this one
    return made


def _is_torn(value: DTensor, size: Sequence[int]) -> bool:
    """Whether a dimension is to be merged or split that is cut into unequal parts, which torch would get wrong."""
    before = value.size()
    lengths = list(before)
    for index, placement in enumerate(value.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        length, parts = lengths[dim], value.device_mesh.size(index)
        lengths[dim] = length // parts
        is_kept = list(size[: dim + 1]) == list(before[: dim + 1]) or list(size[dim - len(before) :]) == list(
            before[dim:]
        )
        if length % parts and not is_kept:
            return True
    return False


def _random(operator: Any, writes: Sequence[Write]) -> Operator:
    tensors = [one for one in operator._schema.arguments if "Tensor" in str(one.type)]
    if [place for place, _ in writes] == [0] and len(tensors) == 1:
        return _fill(operator)

    def random(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        return whole(operator, writes, args, {**kwargs, "generator": generator_of(rank, team)})

    return random


FAMILIES["global"] = operator_on_globals


_RELEASE: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

_WRONG_RULES: Final = frozenset({"nll_loss_forward", "nll_loss_backward"}) | (
    frozenset({"argmax", "argmin", "index_put", "index_put_", "max", "mean", "min"})
    if _RELEASE < (2, 13)
    else frozenset[str]()
)
"""Those that take the mean of the ranks' means, although one may have more labels to ignore than another.

Those of torch 2.9 that take a rank's own places, in what it has, for places in the whole; and its `mean`, which takes
the mean of the ranks' means, although one may have more rows than another; those of 2.10 that gather numbers without
any dimension into a tensor of one.
"""

_WRONG_PARTS: Final = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Those that return, for the derivative, something else than the operator does."""


def _base(operator: Any) -> str:
    name: str = operator._schema.name
    return name.partition("::")[2]


@lru_cache(maxsize=limits.TENSOR_PLANS)
def has_rule(operator: Operator) -> bool:
    """Whether torch says of an operator itself how global tensors go into it and come out."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - see `sharding`

    if _base(operator) in _WRONG_RULES:
        return False
    dispatcher = DTensor._op_dispatcher
    rules = dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    return operator in dispatcher._custom_op_handlers or any(operator in getattr(rules, name, ()) for name in tables)


def _parts_of(operator: Any, writes: Sequence[Write]) -> Operator | None:
    """Return what torch takes an operator into, to be run part by part, or None.

    Where it has no rule, torch itself finds one by these parts and then runs the operator on what each rank has. That
    is wrong for all that count elements or places: `mse_loss_backward` would divide by the number of those of one
    rank, `fill_diagonal_` would fill a diagonal on each (torch 2.13). The parts see global tensors.
    """
    if writes or _base(operator) in _WRONG_PARTS or _RELEASE < (2, 13):
        return None  # before 2.13 one of the parts might be of `_WRONG_RULES`
    from torch._decomp import decomposition_table  # noqa: PLC0415 - see `sharding`

    found: Operator | None = decomposition_table.get(operator)
    return found


Write = tuple[int, str]
"""Place and name of a parameter that an operator writes to."""


def _written(schema: Any) -> list[Write]:
    """Return what an operator writes to."""
    if schema is None:
        return []
    return [
        (place, one.name)
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


_REFUSALS: Final = (
    "does not have a sharding strategy",
    "Sharding propagation failed",
    "not supported with DTensor",
    "hybrid sharding",
    "unhashable type",  # a complex number
)


def _is_refused(error: Exception) -> bool:
    """Whether torch found no way to lay the arguments out; it says so before anything ran, on every rank alike."""
    text = str(error)
    return any(words in text for words in _REFUSALS)


def _is_global(value: Any) -> TypeGuard[DTensor]:
    return hasattr(value, "_local_tensor") and isinstance(value, torch.Tensor)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], parameter: Write) -> Any:
    place, name = parameter
    return args[place] if place < len(args) else kwargs.get(name)


def _globals(tree: Any) -> Iterator[DTensor]:
    if _is_global(tree):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _globals(part)
    elif isinstance(tree, dict):
        yield from _globals(list(tree.values()))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def _settle_inputs(args: Sequence[Any], kwargs: dict[str, Any], writes: Sequence[Write]) -> None:
    """Add up what ranks have parts of, where the operation needs the whole, and keep it so.

    Each operation that reads a partial tensor adds it up by itself; an optimizer reads a gradient several times.
    """
    targets = list(_parts(_argument(args, kwargs, writes[0]))) if writes else []
    written = {place for place, _ in writes}
    for place, value in enumerate(args):
        if place in written:
            continue
        for index, one in enumerate(_parts(value)):
            if not _is_global(one) or not is_partial(one):
                continue
            target = targets[index] if index < len(targets) and _is_global(targets[index]) else None
            goal = target.placements if target is not None and target.shape == one.shape else unsummed(one.placements)
            if not any(placement.is_partial() for placement in goal):
                settle(one, goal)


def _add_up(rank: Rank, target: DTensor) -> None:
    """Lay a partial tensor out anew, before it is written to.

    Raises:
        NotImplementedError: There is a view of it, which would not see that.
    """
    if _is_shared(rank, target):
        raise NotImplementedError(
            "a tensor of which the ranks have parts of a sum cannot be written to in place while there are views of "
            "it: write the operation that returns a new tensor, or trimesh.redistribute(t, [...]) before it"
        )
    settle(target, unsummed(target.placements))


def _sums(args: Sequence[Any], kwargs: dict[str, Any], writes: Sequence[Write]) -> list[DTensor]:
    """Return what an operator writes to of which the ranks have parts of a sum."""
    return [one for write in writes for one in _globals(_argument(args, kwargs, write)) if is_partial(one)]


def _is_shared(rank: Rank, value: DTensor) -> bool:
    memory = memory_of(value)
    return any(other is not value and memory_of(other) == memory for other in rank.values.values())


def whole(
    operator: Operator, writes: Sequence[Write], args: Sequence[Any], kwargs: dict[str, Any], *, follows: bool = False
) -> Any:
    """Run an operator on whole tensors, on every rank.

    Args:
        operator: It, its arguments, and those that it writes to.
        writes: See above.
        args: See above.
        kwargs: See above.
        follows: Whether results are cut along the dimensions that the first tensor is cut along; otherwise only those
            of its size are, and every rank keeps the whole of others.
    """
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - see `sharding`

    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    found = [leaf.full_tensor() if _is_global(leaf) else leaf for leaf in leaves]
    first = next(leaf for leaf in leaves if _is_global(leaf))
    whole_args, whole_kwargs = pytree.tree_unflatten(found, tree)
    result = operator(*whole_args, **whole_kwargs)
    written: dict[int, DTensor] = {}
    for write in writes:
        targets, values = _argument(args, kwargs, write), _argument(whole_args, whole_kwargs, write)
        for target, value in zip(_parts(targets), _parts(values), strict=True):
            if target is not None:
                write_whole(target, value)
                written[id(value)] = target

    def keep(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in written:
            return written[id(value)]
        goal = unsummed(first.placements)
        if value.size() != first.size():
            goal = [one if follows and getattr(one, "dim", value.ndim) < value.ndim else Replicate() for one in goal]
        part = shard_of(value, first.device_mesh, goal)
        return assemble(part.contiguous() if part.numel() < value.numel() else part, first.device_mesh, goal, value)

    return pytree.tree_map(keep, result)


def _blank(like: DTensor, kwargs: dict[str, Any]) -> DTensor:
    """Return a tensor to be filled: nothing in it is partial."""
    operator = torch.ops.aten.empty_like.default
    if is_partial(like):
        operator = torch.ops.aten.zeros_like.default  # an empty one would be as partial as `like`
    made: DTensor = operator(like, **kwargs)
    return made


def _fill(operator: Operator) -> Operator:
    def fill(rank: Rank, team: TeamOnRank, target: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if is_partial(target):
            _add_up(rank, target)
        _draw(operator, generator_of(rank, team), target, *args, **kwargs)
        return target

    return fill


def _draw(operator: Operator, generator: torch.Generator, target: DTensor, *args: Any, **kwargs: Any) -> None:
    local = target._local_tensor
    if local.size() == target.size():  # each rank has all of it
        operator(local, *args, **kwargs, generator=generator)
        return
    values = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=local.device)
    operator(values, *args, **kwargs, generator=generator)
    write_whole(target, values)


def _like(filler: str, *, takes_sizes: bool) -> Operator:
    def like(rank: Rank, team: TeamOnRank, value: DTensor, *bounds: Any, **kwargs: Any) -> DTensor:
        if takes_sizes and len(bounds) == 1:
            bounds = (0, *bounds)
        made = _blank(value, kwargs)
        # The overload is torch's to choose: `random_` has one for each number of bounds.
        _draw(
            lambda local, *args, **rest: getattr(local, filler)(*args, **rest), generator_of(rank, team), made, *bounds
        )
        return made

    return like


def _dropout(rank: Rank, team: TeamOnRank, value: DTensor, p: float, train: bool | None) -> Sequence[DTensor]:  # noqa: FBT001 - torch's signature
    aten = torch.ops.aten
    if train is False:
        return aten.clone.default(value), aten.ones_like.default(value, dtype=torch.bool)
    mask = _blank(value, {"dtype": torch.bool})
    _draw(aten.bernoulli_.float, generator_of(rank, team), mask, 1 - p)
    return aten.mul.Tensor(aten.mul.Tensor(value, mask), 0.0 if p == 1 else 1 / (1 - p)), mask


def _batch_norm(rank: Rank, team: TeamOnRank, value: DTensor, *args: Any) -> Any:
    """Do what torch's does; that writes to the running statistics without saying so, here to copies of them."""
    mean, variance, is_training = args[2:5]
    if not is_training or mean is None:
        return _plain(torch.ops.aten.native_batch_norm.default, (), settles=False)(rank, team, value, *args)
    functional = _plain(torch.ops.aten._native_batch_norm_legit_functional.default, (), settles=False)
    *found, new_mean, new_variance = functional(rank, team, value, *args)
    mean.copy_(new_mean)
    variance.copy_(new_variance)
    return found


_OWN: Final[dict[str, Operator]] = {
    # Those with underscores give what they are given (torch 2.13).
    "__lshift__": lambda _rank, _team, value, by: torch.bitwise_left_shift(value, by),
    "__rshift__": lambda _rank, _team, value, by: torch.bitwise_right_shift(value, by),
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "empty_like": lambda _rank, _team, like, **kwargs: _blank(like, kwargs),
    "native_batch_norm": _batch_norm,
    "native_dropout": _dropout,
}
"""Operators of which torch's way does not serve, by name without overload."""
