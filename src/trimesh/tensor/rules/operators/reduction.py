"""Reductions: sum, mean, maximum, norm, product and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy, words
from trimesh.tensor.rules.cuts import SUM, all_gathered


def _reduced(call: OperatorCall) -> list[int]:
    return call.dims("dim", call.metas[0].ndim)


def _kept(call: OperatorCall, cut: int) -> int:
    """Return the dimension of the result for a dimension of the argument that is not reduced."""
    if call["keepdim"]:
        return cut
    return cut - sum(dim < cut for dim in _reduced(call))


def _offer_kept(call: OperatorCall) -> Iterable[Strategy]:
    meta, gone = call.metas[0], _reduced(call)
    for cut in range(meta.ndim):
        if cut not in gone:
            yield call.strategy({0: cut}, [_kept(call, cut)] * len(call.results))


def _offer_sum(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    yield from _offer_kept(call)
    if not call.result.can_sum:
        return
    meta = call.metas[0]
    if call.is_sum(meta, dim) and call.name in ("sum", "mean") and call.result.dtype == meta.dtype:
        yield call.strategy({0: SUM}, [SUM])
    for cut in _reduced(call):
        yield call.strategy({0: cut}, [SUM])


def _sum_parts(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """Weight the mean of a part by its share of the whole; a sum needs no change."""
    if call.name != "mean":
        return None
    meta = call.metas[0]
    _, part = chosen.part(meta)
    total = count = 1
    for dim in _reduced(call):
        total, count = total * meta.size[dim], count * part[dim]
    if count == total:
        return None

    def mean(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not count:
            return torch.ops.aten.sum.dim_IntList(local, *_dims_of(call), **kwargs)
        return call.operator(local, *args, **kwargs) * (count / total)

    return mean


def _dims_of(call: OperatorCall) -> Sequence[Any]:
    return _reduced(call), bool(call["keepdim"])


def _offer_two(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    yield from _offer_kept(call)
    for cut in _reduced(call):
        yield call.strategy({0: cut}, [WHOLE] * len(call.results))


def gathered(local: torch.Tensor, chosen: Chosen, dims: Sequence[int], along: int) -> torch.Tensor:
    """All-gather along some mesh dimensions, concatenated along a dimension of the tensor."""
    for dim in reversed(dims):
        moved = local.movedim(along, 0).contiguous()
        raw = moved.view(torch.uint8) if moved.dtype is torch.bool else moved
        made = all_gathered(raw, chosen.device_mesh, dim)
        local = (made.view(torch.bool) if moved.dtype is torch.bool else made).movedim(0, along)
    return local


def _two_steps(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """Reduce the local part, then the gathered results of all ranks; this propagates NaN as torch does."""
    gone = _reduced(call)
    across = [dim for dim, cut in enumerate(chosen.args[0]) if cut in gone]
    if not across:
        return None
    first, then = _STEPS[call.name]

    def reduce(local: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        found = gathered(first(call, local, gone, _KEEP), chosen, across, gone[0])
        return then(call, found, gone, bool(call["keepdim"]))

    return reduce


Step = Callable[[OperatorCall, torch.Tensor, Sequence[int], bool], torch.Tensor]


def _norm(call: OperatorCall, value: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:  # noqa: FBT001 - a `Step`
    made: torch.Tensor = torch.linalg.vector_norm(value, call["ord"], dims, keepdim, dtype=call["dtype"])
    return made


def _norm_of_norms(call: OperatorCall, value: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:  # noqa: FBT001
    made: torch.Tensor = torch.linalg.vector_norm(value, call["ord"], dims, keepdim)
    return made


def _step(function: Callable[..., torch.Tensor]) -> Step:
    return lambda _call, value, dims, keepdim: function(value, dims, keepdim=keepdim)


def _product(call: OperatorCall, value: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:  # noqa: FBT001
    for dim in sorted(dims, reverse=True):
        value = torch.prod(value, dim, keepdim=keepdim, dtype=call["dtype"])
    return value


_KEEP: Final = True

_STEPS: Final[dict[str, tuple[Step, Step]]] = {
    "amax": (_step(torch.amax), _step(torch.amax)),
    "amin": (_step(torch.amin), _step(torch.amin)),
    "max": (_step(torch.amax), _step(torch.amax)),
    "min": (_step(torch.amin), _step(torch.amin)),
    "any": (_step(torch.any), _step(torch.any)),
    "all": (_step(torch.all), _step(torch.all)),
    "logsumexp": (_step(torch.logsumexp), _step(torch.logsumexp)),
    "prod": (_product, _product),
    "linalg_vector_norm": (_norm, _norm_of_norms),
}


def _may_two(call: OperatorCall) -> bool:
    meta = call.metas[0]
    if not meta.ndim or not meta.numel:
        return False
    if call.name in ("max", "min"):
        return "dim" not in call.arguments and "other" not in call.arguments
    if call.name == "linalg_vector_norm":
        order = call["ord"]
        return isinstance(order, int | float) and order != 0 and not meta.dtype.is_complex
    return True


def _offer_uncut(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    yield from _offer_kept(call)


def _has_dim(call: OperatorCall) -> bool:
    return isinstance(call["self"], GlobalMeta) and call.metas[0].ndim > 0 and "other" not in call.arguments


_REST: Final = "any dimension that is not reduced"

ROWS: Final = (
    Row(
        "sum",
        words("sum mean nansum count_nonzero"),
        _offer_sum,
        "any dimension",
        "if a reduced dimension is cut, the result is a partial sum",
        _sum_parts,
        may_run=lambda call: call.metas[0].ndim > 0,
    ),
    Row(
        "reduction in two steps",
        tuple(_STEPS),
        _offer_two,
        "any dimension; parts of a reduced one must not be empty",
        "reduced first",
        _two_steps,
        takes_empty=False,
        may_run=_may_two,
    ),
    Row(
        "reduction",
        words("max min var std var_mean std_mean argmax argmin median nanmedian mode kthvalue"),
        _offer_uncut,
        _REST,
        "reduced first",
        may_run=_has_dim,
    ),
)
