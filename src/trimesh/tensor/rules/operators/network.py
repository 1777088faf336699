"""Losses and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy, made_of, words
from trimesh.tensor.rules.cuts import SUM, placements_of
from trimesh.tensor.rules.sums import moved

_NONE, _SUMMED = 0, 2
"""Torch's numbers for the `reduction` of a loss; 1 is the mean."""


def _offer_nll(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, target = call["self"], call["target"]
    if value.ndim < 2:
        return
    for cut in range(target.ndim):
        args = {value.index: cut + (cut > 0), target.index: cut}
        if call["reduction"] == _SUMMED and call.result.can_sum:
            yield call.strategy(args, [SUM, SUM])
        elif call["reduction"] == _NONE:
            yield call.strategy(args, [cut, WHOLE])


def _offer_nll_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, target, grad = call["self"], call["target"], call["grad_output"]
    if value.ndim < 2:
        return
    for cut in range(target.ndim):
        at = cut + (cut > 0)
        yield call.strategy(
            {value.index: at, target.index: cut, grad.index: cut if call["reduction"] == _NONE else WHOLE}, [at]
        )


def _offer_convolution(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, weight = call["input"], call["weight"]
    yield call.strategy({value.index: 0}, [0])
    if call["groups"] == 1 and not call["transposed"]:
        args = {weight.index: 0, **{meta.index: 0 for meta in call.of("bias")}}
        yield call.strategy(args, [1])


def _offer_convolution_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    grad, value = call["grad_output"], call["input"]
    mask = call["output_mask"]
    made = [0] * bool(mask[0]) + [SUM] * bool(mask[1]) + [SUM] * bool(mask[2])
    if all(one.can_sum for one in call.results):
        yield call.strategy({grad.index: 0, value.index: 0}, made)


_FIRST: Final = "reduced first"

ROWS: Final = (
    Row(
        "negative log likelihood",
        words("nll_loss_forward nll_loss2d_forward"),
        _offer_nll,
        "all but classes",
        "sum and weight total are partial sums; a mean divides them afterwards",
        takes_empty=False,
    ),
    Row(
        "derivative of negative log likelihood",
        words("nll_loss_backward nll_loss2d_backward"),
        _offer_nll_backward,
        "all but classes",
        _FIRST,
        takes_empty=False,
    ),
    Row(
        "convolution",
        words("convolution"),
        _offer_convolution,
        "the batch; filters, without groups",
        _FIRST,
        takes_empty=False,
    ),
    Row(
        "derivative of a convolution",
        words("convolution_backward"),
        _offer_convolution_backward,
        "the batch",
        "gradients of filters are partial sums",
        takes_empty=False,
    ),
)


# ---- attention, and its derivative -----------------------------------------------------------------------------------

_ROWS: Final = 2
"""Sequence dimension of queries, keys and values."""


def _offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """Offer cuts of batch and heads; the mask is cut along those that it has."""
    query, mask = call["query"], call["attn_mask"]
    if call["dropout_p"] or query.ndim != 4:
        return
    for cut in (0, 1):
        args = {meta.index: cut for meta in call.metas}
        if any(meta.size[cut] != query.size[cut] for meta in call.metas if meta is not mask):
            continue
        if isinstance(mask, GlobalMeta):
            own = cut - (4 - mask.ndim)
            args[mask.index] = own if own >= 0 and mask.size[own] == query.size[cut] else WHOLE
        at = [one.size.index(query.size[cut]) if cut >= one.ndim else cut for one in call.results]
        if all(one.size[where] == query.size[cut] for one, where in zip(call.results, at, strict=True)):
            yield call.strategy(args, at)
    yield _by_rows(call)


def _by_rows(call: OperatorCall) -> Strategy:
    """Return the strategy that cuts queries along the sequence: a rank computes its rows with all keys and values."""
    query, mask = call["query"], call["attn_mask"]
    args = {meta.index: _ROWS for meta in call.metas}
    args |= {call[name].index: WHOLE for name in ("key", "value")}
    if isinstance(mask, GlobalMeta):
        own = mask.ndim - 2
        args[mask.index] = own if mask.size[own] == query.size[_ROWS] else WHOLE
    return call.strategy(args, [_ROWS] * len(call.results))


def _is_by_rows(call: OperatorCall, chosen: Chosen) -> bool:
    return _ROWS in chosen.args[call["query"].index]


def _localize(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    if not _is_by_rows(call, chosen) or not call["is_causal"]:
        return None
    start, rows = _own_rows(call, chosen)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen = min(start + rows, key.size(_ROWS))
        mask = _causal(query, start, seen)
        key, value = key.narrow(_ROWS, 0, seen), value.narrow(_ROWS, 0, seen)
        return call.operator(query, key, value, attn_mask=mask, scale=call["scale"])

    return attend


def _localize_backward(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """Each rank computes gradients of all keys and values; where these are cut, the gradients are reduce-scattered."""
    if not _is_by_rows(call, chosen):
        return None
    start, rows = _own_rows(call, chosen)

    def derive(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        out, sums = rest[:2]
        seen, mask = key.size(_ROWS), named.get("attn_mask")
        if call["is_causal"]:
            seen = min(start + rows, seen)
            mask = _causal(query, start, seen)
        options = {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask, "scale": call["scale"]}
        own = key.narrow(_ROWS, 0, seen), value.narrow(_ROWS, 0, seen)
        of_query, *others = call.operator(grad, query, *own, out, sums, **options)
        return of_query, *[
            _scattered(one, call.results[place], chosen, place, key.size(_ROWS)) for place, one in enumerate(others, 1)
        ]

    return derive


def _scattered(found: torch.Tensor, meta: GlobalMeta, chosen: Chosen, place: int, length: int) -> torch.Tensor:
    """Reduce-scatter gradients of the first rows to the placement of the result."""
    size = list(found.size())
    if size[_ROWS] < length:
        size[_ROWS] = length - size[_ROWS]
        found = torch.cat([found, found.new_zeros(size)], _ROWS)
    cuts = chosen.results[place]
    parts = placements_of(tuple(SUM if cut == _ROWS else cut for cut in cuts))
    whole = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")
    return moved(made_of(found, chosen.device_mesh, parts, whole), cuts)


def _own_rows(call: OperatorCall, chosen: Chosen) -> tuple[int, int]:
    starts, size = chosen.part(call["query"])
    return starts[_ROWS], size[_ROWS]


def _causal(query: torch.Tensor, start: int, seen: int) -> torch.Tensor:
    """Return the causal mask of query rows from `start` on over the first `seen` keys: no row sees a later key."""
    rows = torch.arange(start, start + query.size(_ROWS), device=query.device)
    is_later = torch.arange(seen, device=query.device) > rows[:, None]
    return torch.zeros(is_later.size(), dtype=query.dtype, device=query.device).masked_fill_(is_later, float("-inf"))


ROWS_ATTENTION: Final = (
    Row(
        "attention",
        words("_scaled_dot_product_flash_attention_for_cpu"),
        _offer,
        "batch and heads; the sequence of queries, for which keys and values are gathered; without dropout",
        "reduced first",
        _localize,
        takes_empty=False,
    ),
    Row(
        "derivative of attention",
        words("_scaled_dot_product_flash_attention_for_cpu_backward"),
        _offer,
        "the same; gradients of keys and values are reduce-scattered if these are cut",
        "reduced first",
        _localize_backward,
        takes_empty=False,
    ),
)
