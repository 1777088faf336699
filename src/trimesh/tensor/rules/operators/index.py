"""Gather, scatter and indexing operators: they read or write elements by index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, OperatorCall, Row, Strategy, words
from trimesh.tensor.rules.cuts import SUM


def _offer_embedding(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    weight, indices = call["weight"], call["indices"]
    last = call.result.ndim - 1
    for cut in range(indices.ndim):
        yield call.strategy({indices.index: cut}, [cut])
    yield call.strategy({weight.index: 1}, [last])
    if call.result.can_sum:
        yield call.strategy({weight.index: 0}, [SUM])


def _localize_embedding(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """For a table cut by rows, return a look-up of this rank's rows that gives zeros for all others (a partial sum)."""
    weight = call["weight"]
    if 0 not in chosen.args[weight.index]:
        return None
    rows, (first, _), (count, _) = weight.size[0], *chosen.part(weight)

    def embed(local: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= rows):
            raise IndexError(f"index out of range in self: indices must be below {rows}, the rows of the table")
        outside = (indices < first) | (indices >= first + count)
        if not count:
            return local.new_zeros((*indices.size(), local.size(1)))
        found = torch.ops.aten.embedding.default(local, (indices - first).masked_fill(outside, 0))
        made: torch.Tensor = found.masked_fill(outside.unsqueeze(-1), 0)
        return made

    return embed


def _offer_embedding_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    grad, indices = call["grad_output"], call["indices"]
    yield call.strategy({grad.index: grad.ndim - 1}, [1])
    if not call["scale_grad_by_freq"] and call.result.can_sum:
        for cut in range(indices.ndim):
            yield call.strategy({grad.index: cut, indices.index: cut}, [SUM])


def _offer_gather(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """Offer cuts of index and tensor outside `dim` where both are equally long, and of the index along `dim`."""
    value, index = call["self"], call["index"]
    if value.ndim != index.ndim or not value.ndim:
        return
    dim = call.dim("dim", value.ndim)
    for cut in range(value.ndim):
        if cut != dim and value.size[cut] == index.size[cut]:
            yield call.strategy({value.index: cut, index.index: cut}, [cut])
    yield call.strategy({index.index: dim}, [dim])


def _offer_scatter(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value = call["self"]
    dim = call.dim("dim", value.ndim)
    if any(meta.ndim not in (0, value.ndim) for meta in call.metas) or not value.ndim:
        return
    for cut in range(value.ndim):
        if cut != dim and all(meta.size[cut] == value.size[cut] for meta in call.metas if meta.ndim):
            yield call.strategy({meta.index: cut for meta in call.metas if meta.ndim}, [cut])


def _offer_index_select(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, index = call["self"], call["index"]
    if not value.ndim:
        return
    dim = call.dim("dim", value.ndim)
    for cut in range(value.ndim):
        if cut != dim:
            yield call.strategy({value.index: cut}, [cut])
    if index.ndim == 1:
        yield call.strategy({index.index: 0}, [dim])


def _offer_index_add(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """`source` has the dimensions of `self`; a number or a tensor without dimensions applies to all indices."""
    value = call["self"]
    if not value.ndim:
        return
    dim = call.dim("dim", value.ndim)
    others = [meta for name in ("source",) for meta in call.of(name)]
    if any(meta.ndim != value.ndim for meta in others):
        return
    for cut in range(value.ndim):
        if cut != dim:
            yield call.strategy({value.index: cut, **{meta.index: cut for meta in others}}, [cut])


def _indexed(call: OperatorCall) -> tuple[list[int], tuple[int, ...], int] | None:
    """Return the indexed dimensions, the broadcast size of the indices, and their first dimension in the result."""
    indices = call["indices"]
    metas = [one for one in indices if one is not None]
    if not metas or any(one.dtype in (torch.bool, torch.uint8) for one in metas):
        return None
    dims = [dim for dim, one in enumerate(indices) if one is not None]
    broadcast: Any = torch.broadcast_shapes
    size = tuple(broadcast(*(one.size for one in metas)))
    is_together = dims == list(range(dims[0], dims[-1] + 1))
    return dims, size, dims[0] if is_together else 0


def _free(call: OperatorCall) -> Iterable[tuple[int, int]]:
    """Yield dimensions of the tensor that are not indexed, each with its dimension among the values."""
    found = _indexed(call)
    if found is None:
        return
    dims, size, at = found
    for dim in range(call["self"].ndim):
        if dim not in dims:
            before = sum(one not in dims for one in range(dim))
            yield dim, before if before < at else before + len(size)


def _offer_index(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value = call["self"]
    for dim, at in _free(call):
        yield call.strategy({value.index: dim}, [at])
    found = _indexed(call)
    if found is None:
        return
    _, size, at = found
    for cut in range(len(size)):
        args = {}
        for meta in call.of("indices"):
            own = cut - (len(size) - meta.ndim)
            args[meta.index] = own if own >= 0 and meta.size[own] == size[cut] else WHOLE
        yield call.strategy(args, [at + cut])


def _offer_index_put(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, values = call["self"], call["values"]
    found = _indexed(call)
    if found is None:
        return
    dims, size, _ = found
    ndim = value.ndim - len(dims) + len(size)
    for dim, at in _free(call):
        own = at - (ndim - values.ndim)
        is_broadcast = own < 0 or values.size[own] != value.size[dim]
        yield call.strategy({value.index: dim, values.index: WHOLE if is_broadcast else own}, [dim])


def _offer_cat(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    metas, made = call.metas, call.result
    along = call.dim("dim", made.ndim)
    if all(one.can_sum and call.is_sum(one, dim) and one.dtype == made.dtype for one in metas):
        yield call.strategy(dict.fromkeys(range(len(metas)), SUM), [SUM])
    if any(one.ndim != made.ndim - (call.name == "stack") for one in metas):
        return
    for cut in range(made.ndim):
        if cut != along:
            own = cut - (cut > along) if call.name == "stack" else cut
            yield call.strategy(dict.fromkeys(range(len(metas)), own), [cut])


def _offer_repeat(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    meta, repeats = call.metas[0], call["repeats"]
    for cut in range(meta.ndim):
        at = cut + len(repeats) - meta.ndim
        if repeats[at] == 1:
            yield call.strategy({0: cut}, [at])


_PLACES: Final = "dimensions that are not indexed, and the index"


def _may_index(call: OperatorCall) -> bool:
    return _indexed(call) is not None


ROWS: Final = (
    Row(
        "table of rows",
        words("embedding"),
        _offer_embedding,
        "indices, and both dimensions of the table",
        "if the table is cut by rows, the result is a partial sum",
        _localize_embedding,
    ),
    Row(
        "derivative of a table of rows",
        words("embedding_dense_backward"),
        _offer_embedding_backward,
        "indices, and columns",
        "if indices are cut, the result is a partial sum",
    ),
    Row(
        "gather",
        words("gather"),
        _offer_gather,
        "the index along the dimension; others, where index and tensor are equally long",
        "reduced first",
    ),
    Row(
        "scatter",
        words("scatter scatter_add scatter_reduce"),
        _offer_scatter,
        "dimensions along which index and source are as long as the tensor",
        "reduced first",
    ),
    Row("index_select", words("index_select"), _offer_index_select, _PLACES, "reduced first"),
    Row(
        "index_add",
        words("index_add index_copy index_fill index_reduce"),
        _offer_index_add,
        "dimensions that are not indexed",
        "reduced first",
    ),
    Row("index", words("index _unsafe_index"), _offer_index, _PLACES, "reduced first", may_run=_may_index),
    Row(
        "index_put",
        words("index_put _unsafe_index_put _index_put_impl"),
        _offer_index_put,
        "dimensions that are not indexed",
        "reduced first",
        may_run=_may_index,
    ),
    Row(
        "join",
        words("cat stack"),
        _offer_cat,
        "dimensions that are not joined along",
        "partial sums give a partial sum",
    ),
    Row("repeat", words("repeat"), _offer_repeat, "dimensions that are not repeated", "reduced first"),
)
