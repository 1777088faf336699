"""Collectives of tensors that the backend cannot reach: copies of them on the host take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils import _pytree as pytree

DEVICES: Final = {"cuda"}
"""Where tensors are that take part as copies."""


@attrs.frozen(eq=False)
class _WorkOnCopies:
    """What a collective of copies is waited for by.

    Attributes:
        work: Of the backend.
        outputs: Tensors that it gives, each with its copy.
    """

    work: Any
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def wait(self) -> None:
        """Wait, once, and write to the tensors."""
        self.work.wait()
        for one, copy in self.outputs:
            one.copy_(copy)


def on_host(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, gives: bool) -> Any:
    """Call a method of a process group, with copies of the tensors of devices.

    Args:
        call: The method.
        args: For it.
        kwargs: For it.
        gives: Whether it writes to the tensors that are, or are in, its first argument.

    Returns:
        What it returns: None, or something to be waited for, which then has written to the tensors.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copied(one: torch.Tensor) -> torch.Tensor:
        if one.device.type not in DEVICES:
            return one
        copy = one.to("cpu", copy=True)
        pairs.append((one, copy))
        return copy

    first = pytree.tree_map_only(torch.Tensor, copied, list(args[:1]))
    outputs = pairs[:] if gives else []
    rest, named = pytree.tree_map_only(torch.Tensor, copied, (list(args[1:]), kwargs))
    work = call(*first, *rest, **named)
    return None if work is None else _WorkOnCopies(work, outputs)
