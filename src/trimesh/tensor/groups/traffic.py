"""What a rank has sent in collectives, counted as rings would send it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs
import torch

_GATHERED: Final = frozenset(
    {
        "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
        "all_gather_single_coalesced",
    }
)  # fmt: skip
"""Their second argument is this rank's part, which goes to each other rank."""

_SCATTERED: Final = frozenset(
    {
        "alltoall", "alltoall_base", "all_to_all_single", "reduce_scatter", "_reduce_scatter_base",
        "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
"""Their second argument has a part for each rank, of which all but its own leave it."""

_REDUCED: Final = frozenset({"allreduce", "allreduce_coalesced"})
"""Their first argument is scattered so, and gathered."""


@attrs.define(eq=False)
class TrafficCounts:
    """Of one rank: how often it took part in which collective, and the bytes that it has sent, by labels of the mesh.

    Attributes:
        by_labels: For each group of labels ("dp", "dp,tp"), by name of the collective.
    """

    by_labels: dict[str, dict[str, list[int]]] = attrs.field(factory=dict[str, dict[str, list[int]]])

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        """Count one collective among some ranks; `begun` is when, which only a profile asks."""
        del begun
        found = self.by_labels.setdefault(labels, {}).setdefault(name, [0, 0])
        found[0] += 1
        found[1] += sent_bytes(name, ranks, args)


def sent_bytes(name: str, ranks: int, args: tuple[Any, ...]) -> int:
    """Return how many bytes a rank sends, by a ring: what other kinds of algorithms send is not known here.

    Collectives that only one rank gives something to, or gets something from, and messages between two, count all that
    they are given.
    """
    if name == "barrier":
        return 0
    if name in _GATHERED:
        return _nbytes(args[1]) * (ranks - 1)
    if name in _SCATTERED:
        return _nbytes(args[1]) * (ranks - 1) // ranks
    if name in _REDUCED:
        return 2 * _nbytes(args[0]) * (ranks - 1) // ranks
    return _nbytes(args[0])


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, Iterable) else 0
