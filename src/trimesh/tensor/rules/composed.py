"""Composite operators: decomposed into operators that run by the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

from trimesh.tensor.protocol.tracing import dtype_of_statistics
from trimesh.tensor.rank.kernel import generator_of
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.call import words
from trimesh.tensor.rules.cuts import all_reduced

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from trimesh.tensor.rules.engine import RuleEngine


Compose = Callable[["RuleEngine", Any, Sequence[Any], dict[str, Any]], Any]
"""Runs a composite operator: takes the engine, the operator and its arguments."""

aten = torch.ops.aten

_DECOMPOSED: Final = words("""
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss native_batch_norm_backward
""")
"""Operators that torch's own decompositions split into operators with rules."""


def _decomposed(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._decomp import decomposition_table  # noqa: PLC0415 - takes a while

    with OnParts(engine):
        return decomposition_table[operator](*args, **kwargs)


def _batch_norm(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute batch norm as torch does; its schema does not declare the writes to the running statistics."""
    value, weight, bias, mean, variance, training, momentum, eps = args
    dtype = dtype_of_statistics(value, args[1:])
    if not training or mean is None:
        legit = aten._native_batch_norm_legit_no_training.default if not training else None
        if legit is not None:
            found = _decomposed(engine, legit, (value, weight, bias, mean, variance, momentum, eps), kwargs)
            return _laid_out(engine, value, found, dtype)
        legit = aten._native_batch_norm_legit.no_stats
        found = _decomposed(engine, legit, (value, weight, bias, True, momentum, eps), kwargs)
        return _laid_out(engine, value, found, dtype)
    functional = aten._native_batch_norm_legit_functional.default
    *found, new_mean, new_variance = _decomposed(engine, functional, args, kwargs)
    engine.run(aten.copy_.default, (mean, new_mean), {})
    engine.run(aten.copy_.default, (variance, new_variance), {})
    return _laid_out(engine, value, found, dtype)


def _laid_out(engine: RuleEngine, value: Any, found: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    """Give results of batch norm torch's memory format: contiguous or channels last."""
    form = suggest_memory_format(value)
    made, *rest = found
    if not made.is_contiguous(memory_format=form):
        made = engine.run(aten.clone.default, (made,), {"memory_format": form})
    return made, *[
        one if one.dtype is dtype else engine.run(aten._to_copy.default, (one,), {"dtype": dtype}) for one in rest
    ]


_MEAN: Final = 1
_SUMMED: Final = 2


def _unless_empty(compose: Compose) -> Compose:
    """Wrap the gradient of a loss by its second argument: return zeros if that is empty, where a mean divides by 0."""

    def composed(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args[1].numel() == 0:
            return engine.run(aten.zeros_like.default, (args[1],), {})
        return compose(engine, operator, args, kwargs)

    return composed


def _smooth_l1_backward(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute as torch's kernel does; torch's decomposition turns NaN into 0."""
    del kwargs
    grad, value, target, reduction, beta = args
    with OnParts(engine):
        apart = value - target
        share = grad / apart.numel() if reduction == _MEAN else grad
        return torch.where(apart <= -beta, -share, torch.where(apart >= beta, share, apart * share / beta))


def _soft_margin_backward(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute as torch's operator does; torch's decomposition turns NaN into infinity."""
    del kwargs
    grad, value, target, reduction = args
    with OnParts(engine):
        power = (-target * value).exp()
        share = -1 / value.numel() if reduction == _MEAN else -1.0
        return (target * power).mul(share).div(power + 1).mul(grad)


def _nll(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Divide the mean by the label count of all ranks: ranks may ignore different numbers of labels."""
    value, target, weight, reduction, ignored = args
    if reduction != _MEAN:
        return engine.by_table(operator, args, kwargs)
    total, count = engine.by_table(operator, (value, target, weight, _SUMMED, ignored), kwargs)
    return engine.run(aten.div.Tensor, (total, count), {}), count


def _norms(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    engine.settle(*args[0])  # in few collectives; a norm of partial sums would reduce each of them anyway
    vector = aten.linalg_vector_norm.default
    return [engine.run(vector, (one, order), {"dtype": dtype}) for one in args[0]]


def _unscale(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on parts, then take the maximum of `found_inf` over all ranks, since only some parts may have an infinity."""
    del kwargs
    grads, found, scale = args
    engine.settle(*grads)
    local, factor = engine.whole(found), engine.whole(scale)
    operator([one._local_tensor for one in grads], local, factor)
    mesh = found.device_mesh
    for dim in range(mesh.ndim):
        local.copy_(all_reduced(local, "max", mesh, dim))


COMPOSED: Final[dict[str, Compose]] = {
    **dict.fromkeys(_DECOMPOSED, _decomposed),
    "mse_loss_backward": _unless_empty(_decomposed),
    "huber_loss_backward": _unless_empty(_decomposed),
    "binary_cross_entropy_backward": _unless_empty(_decomposed),
    "smooth_l1_loss_backward": _unless_empty(_smooth_l1_backward),
    "soft_margin_loss_backward": _unless_empty(_soft_margin_backward),
    "native_batch_norm": _batch_norm,
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
    "_foreach_norm": _norms,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
"""Compositions by operator name without overload."""


# ---- `OnParts`: runs torch's decompositions on global tensors by the table -------------------------------------------


class OnParts(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Dispatch mode that runs operators on global tensors by the table; used for torch's decompositions."""

    def __init__(self, operators: RuleEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return self._operators.run(func, args, kwargs or {})


# ---- random numbers of global tensors --------------------------------------------------------------------------------

# All ranks draw the whole tensor from a generator that the team shares, and each keeps its part. So values do not
# depend on placements, and replicas are equal. It costs every rank the time and, for a moment, the memory of the whole
# tensor. Torch's own scheme is for CUDA only, and its numbers depend on the layout.

Draw = Callable[["RuleEngine", Rank, TeamOnRank, Sequence[Any], dict[str, Any]], Any]

_LIKES: Final = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
_RANDOM: Final = frozenset(words("""
    bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson random_
    rrelu_with_noise rrelu_with_noise_ uniform_ _sample_dirichlet _standard_gamma
"""))  # fmt: skip


def draw_of(operator: Any) -> Draw | None:
    """Return the function that draws random numbers for an operator; None if it draws none."""
    name = operator._schema.name.partition("::")[2]
    if name in _LIKES:
        return _like(_LIKES[name], takes_sizes=name == "randint_like")
    if name == "native_dropout":
        return _dropout
    if name not in _RANDOM:
        return _refused(operator) if torch.Tag.nondeterministic_seeded in operator.tags else None
    schema = operator._schema.arguments
    written = [place for place, one in enumerate(schema) if one.alias_info is not None and one.alias_info.is_write]
    if written == [0] and sum("Tensor" in str(one.type) for one in schema) == 1:
        return _fill(operator)

    def random(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = {**kwargs, "generator": generator_of(rank, team)}
        return engine.fall_back(operator, args, given, is_counted=False)

    return random


def _refused(operator: Any) -> Draw:
    """Refuse an operator whose ranks would draw different numbers; attention without dropout runs."""

    def refuse(engine: RuleEngine, _rank: Rank, _team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        names = [one.name for one in operator._schema.arguments]
        name = next((one for one in ("dropout_p", "dropout") if one in names), None)
        at = -1 if name is None else names.index(name)
        if name is not None and not (args[at] if at < len(args) else kwargs.get(name, 0)):
            return engine.run(operator, args, kwargs)
        raise NotImplementedError(
            f"an operator on global tensors must draw from a generator that the ranks share, got {operator.name()}: "
            "write it with operators that take a generator, or in a function under @trimesh.remote"
        )

    return refuse


def _fill(operator: Callable[..., Any]) -> Draw:
    def fill(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
        target: DTensor = args[0]
        engine.settle(target)
        _drawn(engine, operator, generator_of(rank, team), target, *args[1:], **kwargs)
        return target

    return fill


def _drawn(
    engine: RuleEngine,
    operator: Callable[..., Any],
    generator: torch.Generator,
    target: DTensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    local = target._local_tensor
    kwargs.pop("generator", None)
    if local.size() == target.size():  # replicated
        operator(local, *args, **kwargs, generator=generator)
        return
    values = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=local.device)
    operator(values, *args, **kwargs, generator=generator)
    engine.write(target, values)


def _like(filler: str, *, takes_sizes: bool) -> Draw:
    def like(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
        value, *bounds = args
        if takes_sizes and len(bounds) == 1:
            bounds = [0, *bounds]
        made: DTensor = engine.run(aten.empty_like.default, (value,), kwargs)
        # Torch chooses the overload: `random_` has one for each number of bounds.
        _drawn(
            engine,
            lambda local, *given, **rest: getattr(local, filler)(*given, **rest),
            generator_of(rank, team),
            made,
            *bounds,
        )
        return made

    return like


def _dropout(
    engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], _: dict[str, Any]
) -> Sequence[DTensor]:
    value, p, train = args
    if train is False:
        ones = engine.run(aten.ones_like.default, (value,), {"dtype": torch.bool})
        return engine.run(aten.clone.default, (value,), {}), ones
    mask = engine.run(aten.empty_like.default, (value,), {"dtype": torch.bool})
    _drawn(engine, aten.bernoulli_.float, generator_of(rank, team), mask, 1 - p)
    kept = engine.run(aten.mul.Tensor, (value, mask), {})
    return engine.run(aten.mul.Tensor, (kept, 0.0 if p == 1 else 1 / (1 - p)), {}), mask
