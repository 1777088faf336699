"""What travels of the arguments and results of remote functions, beside their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.frozen
class Operand:
    """Stands for a tensor in arguments that travel, or in a result.

    Attributes:
        index: Which one.
    """

    index: int


@attrs.frozen
class LocalMeta:
    """What a rank says of a tensor that it has.

    Attributes:
        size, stride, dtype: As torch's.
        is_global: Whether it is a part of one tensor, of which these are said.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_global: bool = False


@attrs.frozen
class Named:
    """A function that ranks import.

    Attributes:
        module: Where it is.
        qualname: What it is called there.
    """

    module: str
    qualname: str


@runtime_checkable
class OnRank(Protocol):
    """An argument that is something else on each rank, such as a process group."""

    def on_rank(self, rank: Rank, team: TeamOnRank) -> Any:
        """Return what a function gets in its place."""
        ...


@attrs.frozen
class Here:
    """Stands for the rank that a function runs on."""

    def on_rank(self, rank: Rank, team: TeamOnRank) -> Rank:
        del team
        return rank


def meta_of(tensor: torch.Tensor) -> LocalMeta:
    is_global = hasattr(tensor, "_local_tensor")
    return LocalMeta(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, is_global)


def take_apart(name: str, result: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in what a function has returned, and the rest with an `Operand` for each.

    Raises:
        TypeError: There is something else in it than tensors and None.
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
    """Return what `take_apart` took apart, with these tensors."""
    return pytree.tree_map_only(Operand, lambda operand: tensors[operand.index], parts)
