"""Element-wise operators, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy, localized, words
from trimesh.tensor.rules.cuts import SUM, dense_strides

_PLAIN: Final = words("""
    abs acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min conj_physical copysign cos cosh
    deg2rad digamma elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac frexp gcd
    ge gelu gelu_backward gt hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward hardswish
    hardswish_backward hardtanh hardtanh_backward heaviside hypot i0 igamma igammac isinf isnan isneginf isposinf lcm
    ldexp le leaky_relu leaky_relu_backward lerp lgamma log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward
    logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit logit_backward lt masked_fill maximum minimum mish
    mish_backward mvlgamma nan_to_num native_dropout_backward ne nextafter polygamma pow rad2deg reciprocal relu
    remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus
    softplus_backward softshrink softshrink_backward special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e special_i1 special_i1e
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_xlog1py special_zeta sqrt square tan tanh tanh_backward threshold
    threshold_backward trunc where xlogy copy fill zero complex polar
    __lshift__ __rshift__ __ilshift__ __irshift__ _conj_physical
""")


def broadcast(call: OperatorCall, metas: Iterable[GlobalMeta], size: tuple[int, ...], cut: int) -> dict[int, int]:
    """Return the cut of each tensor that is broadcast to a size of which dimension `cut` is cut."""
    found: dict[int, int] = {}
    for meta in metas:
        own = cut - (len(size) - meta.ndim)
        found[meta.index] = own if own >= 0 and meta.size[own] == size[cut] else WHOLE
    return found


def offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """Offer a cut of any dimension, in all tensors that have it; tensors broadcast along it are replicated."""
    size = call.metas[0].size if call.is_in_place else call.result.size
    if any(one.size != size for one in call.results):
        return
    for cut, length in enumerate(size):
        args = broadcast(call, call.metas, size, cut)
        if length and any(one != WHOLE for one in args.values()):
            yield call.strategy(args, [cut] * len(call.results))


def _offer_linear_one(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Linear in one tensor: partial sums stay partial."""
    meta = call.metas[0]
    if len(call.metas) == 1 and meta.can_sum and call.is_sum(meta, dim) and not call.is_in_place:
        yield call.strategy({0: SUM}, [SUM])
    yield from offer(call, dim)


def _offer_sum(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Sum of two tensors of the same size: if both are partial, the result is partial."""
    metas = call.metas
    if (
        len(metas) == 2
        and not call.is_in_place
        and all(one.can_sum and call.is_sum(one, dim) for one in metas)
        and metas[0].size == metas[1].size
        and metas[0].dtype == metas[1].dtype
        and _is_moderate(call["alpha"])
    ):
        yield call.strategy({0: SUM, 1: SUM}, [SUM])
    yield from offer(call, dim)


def _is_moderate(number: object) -> bool:
    """Return whether a product with a number stays as far from infinity as a sum does."""
    return isinstance(number, int | float) and math.isfinite(number) and abs(number) <= _FACTOR_MAX


def _offer_multiple(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Partial sums of floats stay partial under moderate factors; larger ones could make single parts infinite."""
    number, meta = call["other"], call["self"]
    is_fit = isinstance(meta, GlobalMeta) and meta.dtype.is_floating_point and meta.dtype is not torch.float16
    if call.name == "div":
        is_fit = is_fit and isinstance(number, int | float) and number != 0 and call["rounding_mode"] is None
        is_fit = is_fit and _is_moderate(1 / number)
    is_fit = is_fit and _is_moderate(number)
    if is_fit and meta.can_sum and call.is_sum(meta, dim) and not call.is_in_place and len(call.metas) == 1:
        yield call.strategy({0: SUM}, [SUM])
    yield from offer(call, dim)


def _offer_cast(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Partial sums stay partial under a lossless cast."""
    meta, made = call.metas[0], call.result
    loses_nothing = meta.dtype.is_floating_point and torch.promote_types(meta.dtype, made.dtype) == made.dtype
    if loses_nothing and meta.can_sum and made.can_sum and call.is_sum(meta, dim) and not call.is_in_place:
        yield call.strategy({0: SUM}, [SUM])
    yield from offer(call, dim)


_FACTOR_MAX: Final = 2.0**40

_CUT: Final = "any dimension, the same in all tensors that are not broadcast along it"

ROWS: Final = (
    Row("pointwise", _PLAIN, offer, _CUT, "reduced first", numbers_vary=True),
    Row(
        "linear",
        words("neg clone positive"),
        _offer_linear_one,
        _CUT,
        "partial sums stay partial",
        numbers_vary=True,
    ),
    Row(
        "sum of two",
        words("add sub"),
        _offer_sum,
        _CUT,
        "two partial sums of one size and dtype give a partial sum; with a number, reduced first",
        numbers_vary=True,
    ),
    Row(
        "multiple",
        words("mul div"),
        _offer_multiple,
        _CUT,
        "partial sums of floats stay partial if the factor is not huge, or the divisor not tiny",
        numbers_vary=True,
    ),
    Row(
        "cast",
        words("_to_copy"),
        _offer_cast,
        _CUT,
        "partial sums stay partial if the cast is lossless",
        numbers_vary=True,
    ),
)


# ---- operators that use only the metadata of a tensor ----------------------------------------------------------------


def _offer(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    meta = call.metas[0]
    cut = meta.cuts[dim]
    is_same = call.result.size == meta.size
    yield call.strategy({0: cut}, [cut if is_same and cut != SUM else WHOLE])


def _localize(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    if not call.name.startswith("new_"):
        return None
    made = call.result
    size = chosen.result_size(0, made)
    if call.name != "new_empty_strided":
        return localized(call, size=size)
    return localized(call, size=size, stride=list(dense_strides(size, made.size, made.stride) or made.stride))


ROWS_FACTORY: Final = (
    Row(
        "factory",
        words("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided"),
        _offer,
        "as the given tensor, if sizes are the same",
        "the result is never a partial sum",
        _localize,
    ),
)


# ---- foreach operators on lists of tensors, as optimizers use them ---------------------------------------------------

_FOREACH: Final = tuple(
    f"_foreach_{name}"
    for name in words("""
        abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac
        lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
        sub tan tanh trunc zero
    """)
)


def _lists(call: OperatorCall) -> list[Sequence[object]]:
    return [
        value
        for value in call.arguments.values()
        if isinstance(value, list | tuple) and any(isinstance(one, GlobalMeta) for one in value)
    ]


def _offer_listed(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Give tensors at one list index the placement of the first, which is the one written to if any is."""
    lists = _lists(call)
    if not lists:
        return
    args: dict[int, int] = {}
    made: list[int] = []
    for place in range(len(lists[0])):
        metas = [one for each in lists if place < len(each) and isinstance(one := each[place], GlobalMeta)]
        first = metas[0]
        cut = max(first.cuts[dim], WHOLE)
        if cut == WHOLE and not call.written:
            cut = max(WHOLE, *(one.cuts[dim] for one in metas if one.size == first.size))
        for meta in metas:
            args[meta.index] = cut if meta.size == first.size else WHOLE
        if any(meta.size != first.size and meta.ndim for meta in metas) and cut != WHOLE:
            return  # broadcast
        made.append(cut)
    yield call.strategy(args, made if call.results else [])


ROWS_LISTED: Final = (
    Row(
        "list of tensors",
        _FOREACH,
        _offer_listed,
        "tensors at one index alike, at each index independently",
        "reduced first",
        numbers_vary=True,
    ),
    Row(
        "optimizer",
        words("_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
        _offer_listed,
        "each parameter independently, with its gradient and state",
        "reduced first",
        numbers_vary=True,
    ),
)
