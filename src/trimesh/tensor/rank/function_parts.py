"""Arguments and results of remote functions, with placeholders for tensors and objects of the rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.frozen
class Operand:
    """Placeholder for a tensor in encoded arguments or in a result.

    Attributes:
        index: Index of the tensor.
    """

    index: int


@attrs.frozen
class LocalMeta:
    """Metadata that a rank reports of one of its tensors.

    Attributes:
        size, stride, dtype: As in torch; of the whole tensor if `is_global`.
        is_global: Whether the rank's tensor is a part of a global tensor.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_global: bool = False


@attrs.frozen
class Named:
    """A function that ranks import.

    Attributes:
        module: Name of its module.
        qualname: Qualified name in the module.
    """

    module: str
    qualname: str


@runtime_checkable
class OnRank(Protocol):
    """An argument that is something else on each rank, such as a process group."""

    def on_rank(self, rank: Rank, team: TeamOnRank) -> Any:
        """Return the object that the function receives in its place."""
        ...


@attrs.frozen
class Here:
    """Placeholder for the rank that a function runs on."""

    def on_rank(self, rank: Rank, team: TeamOnRank) -> Rank:
        del team
        return rank


def meta_of(tensor: torch.Tensor) -> LocalMeta:
    is_global = hasattr(tensor, "_local_tensor")
    return LocalMeta(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, is_global)


def take_apart(name: str, result: Any) -> tuple[list[torch.Tensor], Any]:
    """Split a function's result into its tensors and the rest, with an `Operand` in place of each tensor.

    Raises:
        TypeError: The result has leaves other than tensors and None.
    """
    leaves, tree = pytree.tree_flatten(result)
    tensors: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = Operand(len(tensors))
            tensors.append(leaf)
        elif leaf is not None:
            raise TypeError(
                f"a remote function must return tensors, in lists, tuples and dicts, {name} returned {leaf!r:.100}: "
                "write `await trimesh.call_on_shard_and_fetch(...)` for other values"
            )
    return tensors, pytree.tree_unflatten(leaves, tree)


def put_together(parts: Any, tensors: Sequence[Any]) -> Any:
    """Undo `take_apart`: put tensors in place of the operands."""
    return pytree.tree_map_only(Operand, lambda operand: tensors[operand.index], parts)
