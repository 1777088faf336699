"""Operators that are taken into others, each of which runs by the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._prims_common import suggest_memory_format

from trimesh.tensor.protocol.mended import dtype_of_statistics
from trimesh.tensor.rules.collectives import all_reduced
from trimesh.tensor.rules.on_parts import OnParts
from trimesh.tensor.rules.row import words

if TYPE_CHECKING:
    from trimesh.tensor.rules.engine import RuleEngine

Compose = Callable[["RuleEngine", Any, Sequence[Any], dict[str, Any]], Any]
"""Takes what runs operators, the operator and its arguments."""

aten = torch.ops.aten

_DECOMPOSED: Final = words("""
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss native_batch_norm_backward
""")
"""As torch itself takes them apart; what comes of that is a program on whole tensors, whose operators have rules."""


def _decomposed(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._decomp import decomposition_table  # noqa: PLC0415 - takes a while

    with OnParts(engine):
        return decomposition_table[operator](*args, **kwargs)


def _batch_norm(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what torch's does; that writes to the running statistics without saying so."""
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
    """Lay out what batch norm makes as torch's does: contiguous, or with channels last."""
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
    """Return what the gradient of a loss by its second argument is: of no elements none, where a mean divides by 0."""

    def composed(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args[1].numel() == 0:
            return engine.run(aten.zeros_like.default, (args[1],), {})
        return compose(engine, operator, args, kwargs)

    return composed


def _smooth_l1_backward(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what torch's kernel does: its decomposition makes 0 of NaN."""
    del kwargs
    grad, value, target, reduction, beta = args
    with OnParts(engine):
        apart = value - target
        share = grad / apart.numel() if reduction == _MEAN else grad
        return torch.where(apart <= -beta, -share, torch.where(apart >= beta, share, apart * share / beta))


def _soft_margin_backward(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what torch's operator does: its decomposition makes infinity of NaN."""
    del kwargs
    grad, value, target, reduction = args
    with OnParts(engine):
        power = (-target * value).exp()
        share = -1 / value.numel() if reduction == _MEAN else -1.0
        return (target * power).mul(share).div(power + 1).mul(grad)


def _nll(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The mean is of what all ranks count: one may have more labels to ignore than another."""
    value, target, weight, reduction, ignored = args
    if reduction != _MEAN:
        return engine.by_table(operator, args, kwargs)
    total, count = engine.by_table(operator, (value, target, weight, _SUMMED, ignored), kwargs)
    return engine.run(aten.div.Tensor, (total, count), {}), count


def _norms(engine: RuleEngine, _operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    engine.settle(*args[0])  # at once; a norm of parts adds them up in any case
    vector = aten.linalg_vector_norm.default
    return [engine.run(vector, (one, order), {"dtype": dtype}) for one in args[0]]


def _unscale(engine: RuleEngine, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A rank whose part has an infinity says so to all."""
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
"""By name without overload."""
