"""Operators that take the metadata of a tensor and not its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, OperatorCall, Strategy, localized
from trimesh.tensor.rules.cuts import SUM, dense_strides
from trimesh.tensor.rules.row import Row, words


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


ROWS: Final = (
    Row(
        "factory",
        words("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"),
        _offer,
        "as the tensor that it looks like, where sizes are the same",
        "the result is never in parts",
        _localize,
    ),
)
