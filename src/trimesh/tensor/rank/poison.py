"""`Poison`, which stands for a tensor that could not be computed, and what heals one that was only to be written to.

An operation in place that has failed, or was not run, leaves memory behind it. Its poison keeps that: a command that
overwrites all of it makes the tensor right again, whatever was in it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final, Literal

import attrs
import torch

OnKept = Literal["", "overwrites", "views"]
"""What an operation does with the memory of its target, or of what it views, that is safe if that is poisoned."""

_OVERWRITING: Final = frozenset(
    (
        "copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "bernoulli_", "cauchy_", "exponential_",
        "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    )
)  # fmt: skip
"""Operators that write all of their target, and read nothing of it."""

_SAME: Final = frozenset({"alias", "detach"})
"""Views of a global tensor that no rank needs another for."""


@attrs.frozen(eq=False)
class Poison:
    """Stands in the place of a tensor that could not be computed.

    Attributes:
        team, number: The command that has failed first.
        what: Name of its operation.
        error: What it has raised.
        kept: What was to be written to in place, as it is now; None for what was never made.
    """

    team: int
    number: int
    what: str
    error: BaseException
    kept: torch.Tensor | None = None

    def of_result(self) -> Poison:
        """Return the poison of what was to be made of this: there is no memory of it."""
        return self if self.kept is None else attrs.evolve(self, kept=None)


def on_kept_of(operator: Any, *, is_global: bool) -> OnKept:
    """Return what an operator of torch does with the memory of something poisoned; "" if it must not be run."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return ""
    name = schema.name.partition("::")[2]
    if name in _OVERWRITING:
        return "overwrites"
    is_view = name in _SAME if is_global else bool(operator.is_view)
    return "views" if is_view else ""


def heal(table: MutableMapping[int, Any], written: torch.Tensor) -> None:
    """Give tensors of a table back that are poisoned, and share no memory but what was just overwritten."""
    memory = memory_of(written)
    begin, end = span_of(written)
    if local_of(written).nbytes < end - begin:  # there are gaps in it, which hold what they held
        begin = end
    for ref, found in table.items():
        kept = kept_of(found)
        if type(found) is Poison and kept is not None and memory_of(kept) == memory:
            first, last = span_of(kept)
            if kept is written or (begin <= first and last <= end):
                table[ref] = kept


def kept_of(value: Any) -> Any:
    """Return a tensor, or what is left of a poisoned one."""
    return value.kept if type(value) is Poison else value


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a global tensor, or the tensor itself."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local


def memory_of(value: Any) -> int | None:
    """Return the identity of the memory that a tensor, or this rank's part of a global one, lies in."""
    if not isinstance(value, torch.Tensor):
        return None
    local = local_of(value)
    return local.untyped_storage()._cdata if type(local) is torch.Tensor else None


def span_of(value: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of memory in which a tensor, or this rank's part, begins and ends."""
    local = local_of(value)
    begin = int(local.storage_offset())
    steps = sum((length - 1) * step for length, step in zip(local.size(), local.stride(), strict=True))
    end = begin + steps + 1 if local.numel() else begin
    return begin * local.element_size(), end * local.element_size()
