"""Operators along some dimensions (softmax, sort, cumsum, ...): all other dimensions may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy, localized, words

Used = Callable[[OperatorCall], Sequence[int]]
"""Returns the dimensions that a call computes along."""


def _named(name: str) -> Used:
    def used(call: OperatorCall) -> Sequence[int]:
        ndim = call.metas[0].ndim
        return call.dims(name, ndim) if isinstance(call[name], list | tuple) else [call.dim(name, ndim)]

    return used


def _last(count: int) -> Used:
    def used(call: OperatorCall) -> Sequence[int]:
        ndim = call.metas[0].ndim
        return range(max(0, ndim - count), ndim)

    return used


def _padded(call: OperatorCall) -> Sequence[int]:
    pad, ndim = call["pad"], call.metas[0].ndim
    return [ndim - 1 - at // 2 for at, count in enumerate(pad) if count]


def _rolled(call: OperatorCall) -> Sequence[int]:
    ndim = call.metas[0].ndim
    return call.dims("dims", ndim)


_RESIZED_BACK: Final = words("""
    upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    _upsample_nearest_exact2d_backward
""")

_USED: Final[dict[str, Used]] = {
    **dict.fromkeys(words("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"), _named("dim")),
    **dict.fromkeys(
        words("cumsum cumprod logcumsumexp cummax cummin _cummax_helper sort topk glu glu_backward"), _named("dim")
    ),
    **dict.fromkeys(words("flip roll"), _rolled),
    "constant_pad_nd": _padded,
    **dict.fromkeys(words("tril triu"), _last(2)),
    **dict.fromkeys(words("avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d"), _last(2)),
    **dict.fromkeys(
        words("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d"), _last(2)
    ),
    **dict.fromkeys(_RESIZED_BACK, _last(2)),
    **dict.fromkeys(
        words("avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward"), _last(2)
    ),
    **dict.fromkeys(
        words("reflection_pad2d replication_pad2d reflection_pad2d_backward replication_pad2d_backward"), _last(2)
    ),
    **dict.fromkeys(
        words("reflection_pad1d replication_pad1d reflection_pad1d_backward replication_pad1d_backward"), _last(1)
    ),
    **dict.fromkeys(words("pixel_shuffle pixel_unshuffle channel_shuffle"), _last(3)),
    **dict.fromkeys(words("linalg_cholesky_ex linalg_inv_ex linalg_qr triangular_solve"), _last(2)),
}


def _offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    used, ndim = _USED[call.name](call), call.metas[0].ndim
    for cut in range(ndim):
        if cut not in used and all(
            one.ndim > cut and one.size[cut] == call.metas[0].size[cut] for one in (*call.metas, *call.results)
        ):
            yield call.strategy(dict.fromkeys(range(len(call.metas)), cut), [cut] * len(call.results))


def _fits(call: OperatorCall) -> bool:
    ndim = call.metas[0].ndim
    return ndim > 0 and all(one.ndim == ndim for one in call.metas)


def _not_normalized(call: OperatorCall) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield each dimension that is not normalized, with the cuts of the tensors that have it."""
    value = call["input"]
    assert isinstance(value, GlobalMeta)
    for cut in range(value.ndim - len(call["normalized_shape"])):
        yield cut, dict.fromkeys((meta.index for meta in call.metas if meta.ndim == value.ndim), cut)


def _offer_layer_norm(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    for cut, args in _not_normalized(call):
        yield call.strategy(args, [cut] * len(call.results))


def _offer_layer_norm_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value = call["input"]
    for cut, args in _not_normalized(call):
        yield call.strategy(
            args,
            [
                cut if one.ndim == value.ndim and one.size == value.size and not _is_weight(call, place) else -2
                for place, one in enumerate(call.results)
            ],
        )


def _is_weight(call: OperatorCall, place: int) -> bool:
    return place > 0 or not call["output_mask"][0]


_GROUPED: Final = words("input grad_out mean rstd")


def _offer_group_norm(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    args = {one.index: 0 for name in _GROUPED for one in call.of(name)}
    if call.name == "native_group_norm":
        yield call.strategy(args, [0] * len(call.results))
    else:
        mask = call["output_mask"]
        yield call.strategy(args, [0 if place == 0 and mask[0] else -2 for place in range(len(call.results))])


def _localize_group_norm(call: OperatorCall, chosen: Chosen) -> Callable[..., Any]:
    value = call["input"]
    assert isinstance(value, GlobalMeta)
    return localized(call, N=chosen.part(value)[1][0])


def _localize_resized_back(call: OperatorCall, chosen: Chosen) -> Callable[..., Any]:
    return localized(call, input_size=chosen.result_size(0, call.result))


_LEFT: Final = "dimensions that the operator does not compute along"

ROWS: Final = (
    Row(
        "along a dimension",
        tuple(name for name in _USED if "pool" not in name and "upsample" not in name),
        _offer,
        _LEFT,
        "reduced first",
        takes_empty=False,
        may_run=_fits,
    ),
    Row(
        "image",
        tuple(name for name in _USED if "pool" in name or ("upsample" in name and "backward" not in name)),
        _offer,
        "batch and channels",
        "reduced first",
        takes_empty=False,
        may_run=_fits,
    ),
    Row(
        "derivative of a resized image",
        _RESIZED_BACK,
        _offer,
        "batch and channels",
        "reduced first",
        _localize_resized_back,
        takes_empty=False,
    ),
    Row(
        "layer norm",
        words("native_layer_norm _fused_rms_norm"),
        _offer_layer_norm,
        "dimensions that are not normalized",
        "reduced first",
        takes_empty=False,
    ),
    Row(
        "derivative of layer norm",
        words("native_layer_norm_backward _fused_rms_norm_backward"),
        _offer_layer_norm_backward,
        "dimensions that are not normalized",
        "gradients of weights are partial sums",
        takes_empty=False,
    ),
    Row(
        "group norm",
        words("native_group_norm native_group_norm_backward"),
        _offer_group_norm,
        "the batch",
        "gradients of weights are partial sums",
        _localize_group_norm,
        takes_empty=False,
    ),
)
