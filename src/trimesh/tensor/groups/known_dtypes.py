"""Collectives of dtypes that back ends lack: such tensors travel as bytes, or are reduced as wider ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

REDUCING: Final = frozenset(
    {
        "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
"""Collectives that compute; others only move bytes."""

_KNOWN: Final = frozenset(
    {
        torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64,
    }
)  # fmt: skip

_WIDER: Final = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # the same bits
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


@attrs.frozen(eq=False)
class _WorkOnWider:
    """What a collective of wider tensors is waited for by.

    Attributes:
        work: Of the back end.
        outputs: Tensors that it gives, each with the wider one.
        is_turned: Whether the sign of what stands for unsigned numbers is turned, so that their order is theirs.
    """

    work: Any
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    is_turned: bool

    def wait(self) -> None:
        """Wait, once, and write to the tensors."""
        self.work.wait()
        for one, wide in self.outputs:
            one.copy_(_turned(wide).view(one.dtype) if self.is_turned else wide)


def by_known_dtypes(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a process group with tensors of dtypes that its back end has.

    Args:
        name: Of the method.
        call: The method.
        args: For it; it writes to the tensors that are, or are in, the first of them.
        kwargs: For it.

    Returns:
        What it returns: None, or something to be waited for, which then has written to the tensors.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if all(one.dtype in _KNOWN for one in leaves if isinstance(one, torch.Tensor)):
        return call(*args, **kwargs)
    if name not in REDUCING:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _as_bytes, (args, kwargs))
        return call(*args, **kwargs)
    has_order = any(_orders(getattr(one, "reduceOp", None)) for one in leaves)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widened(one: torch.Tensor) -> torch.Tensor:
        wider = _WIDER.get(one.dtype)  # torch adds up complex numbers itself
        if wider is None:
            return one
        is_turned = has_order and one.dtype is torch.uint64
        wide = _turned(one.view(wider)) if is_turned else one.to(wider)
        pairs.append((one, wide))
        return wide

    first = pytree.tree_map_only(torch.Tensor, widened, list(args[:1]))
    outputs = pairs[:]
    rest, named = pytree.tree_map_only(torch.Tensor, widened, (list(args[1:]), kwargs))
    work = call(*first, *rest, **named)
    is_turned = has_order and any(one.dtype is torch.uint64 for one, _ in outputs)
    return None if work is None else _WorkOnWider(work, outputs, is_turned)


def _orders(operation: Any) -> bool:
    return bool(operation == dist.ReduceOp.MIN or operation == dist.ReduceOp.MAX)  # noqa: PLR1714 - not the other way


def _as_bytes(one: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in a further dimension: the sizes along all others are the same."""
    return one if one.dtype in _KNOWN else one.unsqueeze(-1).view(torch.uint8)


def _turned(wide: torch.Tensor) -> torch.Tensor:
    """Return numbers that order as unsigned ones with the same bits do, or back."""
    return wide ^ torch.iinfo(torch.int64).min
