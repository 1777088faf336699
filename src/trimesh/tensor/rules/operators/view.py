"""View operators (transpose, reshape, slice, ...) and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy, localized
from trimesh.tensor.rules.cuts import SUM, part_of

Mapping = Callable[[OperatorCall, int], int | None]
"""Maps a cut dimension of the argument to the dimension of the results; None if these cannot be cut so."""


def _same(_call: OperatorCall, cut: int) -> int:
    return cut


def _t(call: OperatorCall, cut: int) -> int:
    return cut if call.metas[0].ndim < 2 else 1 - cut


def _transpose(call: OperatorCall, cut: int) -> int:
    ndim = call.metas[0].ndim
    one, other = call.dim("dim0", ndim), call.dim("dim1", ndim)
    return other if cut == one else one if cut == other else cut


def _permute(call: OperatorCall, cut: int) -> int:
    ndim = call.metas[0].ndim
    order: list[int] = [dim % ndim for dim in call["dims"]]
    return order.index(cut)


def _unsqueeze(call: OperatorCall, cut: int) -> int:
    at: int = call["dim"] % (call.metas[0].ndim + 1)
    return cut + (cut >= at)


def _squeezed(call: OperatorCall) -> list[int]:
    """Return the dimensions that a call removes: those of length 1 in the whole tensor."""
    meta = call.metas[0]
    named = call.dims("dim", meta.ndim) if "dim" in call.arguments else range(meta.ndim)
    if call["dim"] == [] or call["dim"] == ():
        named = []
    return [dim for dim in named if meta.size[dim] == 1]


def _squeeze(call: OperatorCall, cut: int) -> int | None:
    gone = _squeezed(call)
    return None if cut in gone else cut - sum(dim < cut for dim in gone)


def _expand(call: OperatorCall, cut: int) -> int | None:
    meta = call.metas[0]
    at = cut + call.result.ndim - meta.ndim
    return at if call.result.size[at] == meta.size[cut] else None


def _select(call: OperatorCall, cut: int) -> int | None:
    dim = call.dim("dim", call.metas[0].ndim)
    return None if cut == dim else cut - (cut > dim)


def _slice(call: OperatorCall, cut: int) -> int | None:
    meta = call.metas[0]
    dim = call.dim("dim", meta.ndim)
    return cut if cut != dim or (call["step"] == 1 and call.result.size[dim] == meta.size[dim]) else None


def _other(call: OperatorCall, cut: int) -> int | None:
    return None if cut == call.dim("dim", call.metas[0].ndim) else cut


def _unfold(call: OperatorCall, cut: int) -> int | None:
    return None if cut == call.dim("dimension", call.metas[0].ndim) else cut


def _diagonal(call: OperatorCall, cut: int) -> int | None:
    ndim = call.metas[0].ndim
    gone = {call.dim("dim1", ndim), call.dim("dim2", ndim)}
    return None if cut in gone else cut - sum(dim < cut for dim in gone)


def _pairs(call: OperatorCall, cut: int) -> int | None:
    return None if cut == call.metas[0].ndim - 1 else cut


def _bytes(call: OperatorCall, cut: int) -> int | None:
    meta = call.metas[0]
    return cut if meta.dtype.itemsize == call.result.dtype.itemsize or cut < meta.ndim - 1 else None


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Return the groups of dimensions that correspond in two sizes; None for a tensor without elements."""
    if 0 in before or 0 in after:
        return None
    found: list[tuple[list[int], list[int]]] = []
    left, right = 0, 0
    while left < len(before) or right < len(after):
        olds: list[int] = []
        news: list[int] = []
        one = other = 1
        while not olds or not news or one != other:
            if left < len(before) and (one <= other or right >= len(after)) and not (olds and news and one == other):
                olds.append(left)
                one *= before[left]
                left += 1
            elif right < len(after):
                news.append(right)
                other *= after[right]
                right += 1
            else:
                break
        found.append((olds, news))
    return found


def _target(call: OperatorCall, cut: int) -> tuple[int, bool] | None:
    """Return the dimension of the result that replaces one, and whether parts of unequal length still correspond."""
    before, after = call.metas[0].size, call.result.size
    if before == after:
        return cut, True
    groups = groups_of(before, after)
    if groups is None or before[cut] == 1:
        return None
    olds, news = next(group for group in groups if cut in group[0])
    olds = [dim for dim in olds if before[dim] > 1]
    news = [dim for dim in news if after[dim] > 1]
    if not olds or olds[0] != cut or not news:
        return None
    return news[0], len(olds) == len(news) == 1


def _view(call: OperatorCall, cut: int) -> int | None:
    found = _target(call, cut)
    if found is None:
        return None
    at, is_same = found
    meta = call.metas[0]
    parts = 1
    for own, count in zip(meta.cuts, call.mesh, strict=True):
        parts *= count if own == cut else 1
    return at if is_same or (meta.size[cut] % parts == 0 and call.result.size[at] % parts == 0) else None


_MAPPINGS: Final[dict[str, Mapping]] = {
    "alias": _same, "detach": _same, "lift_fresh": _same, "t": _t, "transpose": _transpose, "permute": _permute,
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "expand": _expand, "select": _select, "slice": _slice,
    "split": _other, "split_with_sizes": _other, "unbind": _select, "unfold": _unfold, "diagonal": _diagonal,
    "view": _view, "_unsafe_view": _view, "view_as_real": _same, "view_as_complex": _pairs,
}  # fmt: skip

_RESIZED: Final = frozenset({"view", "_unsafe_view"})


def _offer(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    meta = call.metas[0]
    cut, count = meta.cuts[dim], len(call.results)
    if call.name == "view" and "dtype" in call.arguments:
        at = _bytes(call, cut) if cut >= 0 else None
        if at is not None:
            yield call.strategy({0: cut}, [at])
        return
    if cut == SUM:
        yield call.strategy({0: SUM}, [SUM] * count)
    if cut < 0:
        return
    at = _MAPPINGS[call.name](call, cut)
    if at is not None:
        yield call.strategy({0: cut}, [at] * count)
    elif call.name in _RESIZED and sum(one != WHOLE for one in meta.cuts) == 1:
        found = _target(call, cut)  # unequal parts: run on the whole tensor, then slice
        if found is not None:
            yield call.strategy({0: WHOLE}, [found[0]])


def _localize(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    if call.name == "squeeze":  # a part may have length 1 where the whole is longer
        gone = _squeezed(call)
        return lambda local, *_: torch.ops.aten.squeeze.dims(local, gone)
    if "size" not in call.arguments or call.name not in (*_RESIZED, "expand"):
        return None
    result = call.result
    size = chosen.result_size(0, result)
    if call.name not in _RESIZED or chosen.args[0] == chosen.results[0]:
        return localized(call, size=size)
    late = [
        dim
        for dim, (arg, made) in enumerate(zip(chosen.args[0], chosen.results[0], strict=True))
        if arg == WHOLE != made
    ]
    if not late:
        return localized(call, size=size)
    [dim] = late
    at = chosen.results[0][dim]
    start, length = part_of(result.size[at], chosen.mesh[dim], chosen.place[dim])

    def view(local: Any, *_: Any) -> Any:
        return call.operator(local, list(result.size)).narrow(at, start, length).clone()

    return view


def _offer_backward(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """The result has `input_sizes`; dimensions that the view kept are cut as the gradient's."""
    meta, made = call.metas[0], call.result
    if meta.can_sum and call.is_sum(meta, dim):
        yield call.strategy({0: SUM}, [SUM])
    for cut in range(made.ndim):
        own = _BACKWARD[call.name](call, cut)
        if own is not None:
            yield call.strategy({0: own}, [cut])


def _from_diagonal(call: OperatorCall, cut: int) -> int | None:
    ndim = call.result.ndim
    gone = {call.dim("dim1", ndim), call.dim("dim2", ndim)}
    return None if cut in gone else cut - sum(dim < cut for dim in gone)


def _from_select(call: OperatorCall, cut: int) -> int | None:
    dim = call.dim("dim", call.result.ndim)
    return None if cut == dim else cut - (cut > dim)


def _from_slice(call: OperatorCall, cut: int) -> int | None:
    return None if cut == call.dim("dim", call.result.ndim) else cut


_BACKWARD: Final[dict[str, Mapping]] = {
    "slice_backward": _from_slice, "select_backward": _from_select, "diagonal_backward": _from_diagonal,
    "unfold_backward": _from_slice,
}  # fmt: skip


def _localize_backward(call: OperatorCall, chosen: Chosen) -> Callable[..., Any]:
    return localized(call, input_sizes=chosen.result_size(0, call.result))


def _offer_scatter(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    mapping = _SCATTERS[call.name]
    src = call["src"]
    assert isinstance(src, GlobalMeta)
    for cut in range(call.result.ndim):
        own = mapping(call, cut)
        if own is not None:
            yield call.strategy({0: cut, src.index: own}, [cut])


_SCATTERS: Final[dict[str, Mapping]] = {
    "slice_scatter": _from_slice, "select_scatter": _from_select, "diagonal_scatter": _from_diagonal,
}  # fmt: skip

ROWS: Final = (
    Row(
        "view",
        tuple(_MAPPINGS),
        _offer,
        "dimensions that the result has; of merged or split ones the first, in equal parts only",
        "partial sums stay partial; a reduction reaches all views",
        _localize,
        is_view=True,
    ),
    Row(
        "derivative of a view",
        tuple(_BACKWARD),
        _offer_backward,
        "dimensions that the view kept",
        "partial sums stay partial",
        _localize_backward,
    ),
    Row("write to a view", tuple(_SCATTERS), _offer_scatter, "dimensions that the view kept", "reduced first"),
)
