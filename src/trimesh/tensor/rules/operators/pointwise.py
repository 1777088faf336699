"""Operators that compute each element of the result from the elements at its place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.row import Row, words

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
    """Return how tensors that are broadcast to a size lie where dimension `cut` of it is cut."""
    found: dict[int, int] = {}
    for meta in metas:
        own = cut - (len(size) - meta.ndim)
        found[meta.index] = own if own >= 0 and meta.size[own] == size[cut] else WHOLE
    return found


def offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """Any dimension may be cut, the same in all that have it; what is broadcast along it is whole."""
    size = call.metas[0].size if call.is_in_place else call.result.size
    if any(one.size != size for one in call.results):
        return
    for cut, length in enumerate(size):
        args = broadcast(call, call.metas, size, cut)
        if length and any(one != WHOLE for one in args.values()):
            yield call.strategy(args, [cut] * len(call.results))


def _offer_linear_one(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Of one tensor: parts of a sum stay so."""
    meta = call.metas[0]
    if len(call.metas) == 1 and meta.can_sum and call.is_sum(meta, dim) and not call.is_in_place:
        yield call.strategy({0: SUM}, [SUM])
    yield from offer(call, dim)


def _offer_sum(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """Of two tensors of the same size: parts of two sums are parts of the sum."""
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
    """Whether a product with a number stays as far from infinity as a sum does."""
    return isinstance(number, int | float) and math.isfinite(number) and abs(number) <= _FACTOR_MAX


def _offer_multiple(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """By a number of some size parts of a sum of floats stay so; by others the parts alone might be infinite."""
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
    """A cast that loses nothing keeps parts of a sum."""
    meta, made = call.metas[0], call.result
    loses_nothing = meta.dtype.is_floating_point and torch.promote_types(meta.dtype, made.dtype) == made.dtype
    if loses_nothing and meta.can_sum and made.can_sum and call.is_sum(meta, dim) and not call.is_in_place:
        yield call.strategy({0: SUM}, [SUM])
    yield from offer(call, dim)


_FACTOR_MAX: Final = 2.0**40

_CUT: Final = "any dimension, the same in all tensors that are not broadcast along it"

ROWS: Final = (
    Row("pointwise", _PLAIN, offer, _CUT, "added up first", numbers_vary=True),
    Row(
        "linear",
        words("neg clone positive"),
        _offer_linear_one,
        _CUT,
        "parts of a sum stay so",
        numbers_vary=True,
    ),
    Row(
        "sum of two",
        words("add sub"),
        _offer_sum,
        _CUT,
        "parts of two sums of one size and dtype give parts of a sum; never with a number",
        numbers_vary=True,
    ),
    Row(
        "multiple",
        words("mul div"),
        _offer_multiple,
        _CUT,
        "parts of a sum of floats stay so by a number that is not huge; a quotient by one that is not tiny",
        numbers_vary=True,
    ),
    Row(
        "cast",
        words("_to_copy"),
        _offer_cast,
        _CUT,
        "parts of a sum stay so where the dtype loses nothing",
        numbers_vary=True,
    ),
)
