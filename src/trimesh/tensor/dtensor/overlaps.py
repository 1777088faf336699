"""Whether what an operator writes to, and what it reads, share some places of memory, as torch asks before it writes.

Torch refuses `t.sub_(t[0])`. Of global tensors the view may be a copy on the ranks, so that their kernels see nothing
of it; here torch looks at tensors that lie as the whole ones do in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trimesh import limits
from trimesh.tensor.dtensor.copied_view import CopiedViews, is_dense
from trimesh.tensor.rank.poison import span_of
from trimesh.tensor.rules.arguments import globals_in, replaced

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check_overlap(
    views: CopiedViews, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[DTensor]
) -> None:
    """Refuse an operator that torch would refuse as it writes to a part of what it reads.

    It costs nothing unless an argument is a copied view of what is written to, or the other way round, and they overlap
    in part. Then the operator runs on zeros in this process, of `limits.TENSOR_TRIED_BYTES_MAX` at most.

    Raises:
        RuntimeError: What torch raises.
    """
    if not written:
        return
    tensors = globals_in((args, kwargs))
    if not any(
        views.share(one, other) and overlap_in_part(*views.laid_out_as((one, other), torch.device("meta")))
        for one in written
        for other in tensors
        if other is not one and views.has((one, other))
    ):
        return
    if sum(one.numel() * one.dtype.itemsize for one in tensors) > limits.TENSOR_TRIED_BYTES_MAX:
        return
    plain = iter(views.laid_out_as(tensors, torch.device("cpu")))
    with torch.no_grad():
        operator(*replaced(tuple(args), plain), **replaced(kwargs, plain))


def overlap_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one memory have some of its places in common and some not, as far as torch sees it.

    As torch does, this leaves out tensors with gaps between their elements.
    """
    if not (one.numel() and other.numel() and is_dense(one) and is_dense(other)):
        return False
    begin, end = span_of(one)
    first, last = span_of(other)
    if (begin, end) == (first, last):
        return one.stride() != other.stride()
    return begin < last and first < end
