"""Tensors of this process that torch itself has made on its way to an operation on mesh tensors.

The 0.0 of `where(mask, t, 0.0)`, the indices of `t[[0, 2]]`, the zeros in the derivative of `clamp`: torch makes them
on the device that a handle names, and cannot know that this means the ranks. They are put there.

A tensor that the user has made is an error instead, and so it must be told from these. Nothing of Python but the
arguments holds a temporary, so its object has fewer references than that of a tensor on which code in Python has
called an operation. How many they are is measured once, because it differs between releases of torch and of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import upload

if TYPE_CHECKING:
    from trimesh.tensor.controller.team import Team


class LocalTensor(Exception):
    """A tensor that the user has made in this process is among the arguments, or one that would be written to."""


def adopted(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team, *, is_global: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operator with the temporaries among them put onto the ranks.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: The others.
        team: The ranks of the other tensors.
        is_global: Whether those are global; then what torch has made on each rank, because a mesh is active, is a
            temporary, too.

    Raises:
        LocalTensor: One is no temporary, or is to be written to.
    """
    adopt = partial(_adopt, team, is_global=is_global)
    written = _written(func)
    # No name is given to any argument here or by the callers, and no list is made of them: that would be a reference.
    new_args = [_adopted(args, place, adopt, is_written=place in written) for place in range(len(args))]
    return new_args, {name: _adopted(kwargs, name, adopt, is_written=name in written) for name in kwargs}


def _adopt(team: Team, tensor: torch.Tensor, *, is_global: bool) -> MeshTensor:
    if not is_global:
        return upload(tensor, team)
    above = MeshTensor._above
    adopted: MeshTensor = above.whole(tensor, team) if type(tensor) is MeshTensor else above.put_global(tensor, team)
    return adopted


def _adopted(holder: Any, key: Any, adopt: partial[MeshTensor], *, is_written: bool) -> Any:
    kind = type(holder[key])
    if kind is list or kind is tuple:
        inner = holder[key]
        return kind([_adopted(inner, place, adopt, is_written=is_written) for place in range(len(inner))])
    if not issubclass(kind, torch.Tensor) or (
        kind is MeshTensor and (holder[key]._meta.is_global or not adopt.keywords["is_global"])
    ):
        return holder[key]
    if holder[key].is_meta and not is_written:  # so torch asks what becomes of a zero of a derivative, without data
        with no_dispatch():
            zeros = torch.zeros(holder[key].size(), dtype=holder[key].dtype)
        return adopt(zeros).to("meta")
    limit = _references_of_temporaries()
    if is_written or sys.getrefcount(holder[key]) > limit:
        raise LocalTensor
    # A view may be one of a tensor that is known: `linear` takes the transpose of the user's weight.
    if holder[key]._is_view() and sys.getrefcount(holder[key]._base) > limit - 1:  # no arguments hold that one
        raise LocalTensor
    return adopt(holder[key])


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Return the places and names of the parameters that an operator changes in place."""
    parameters = enumerate(func._schema.arguments)
    written = [(place, one.name) for place, one in parameters if one.alias_info and one.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)


class _Probe(torch.Tensor):
    """Looks at the 0.0 of `where(mask, probe, 0.0)`."""

    references: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types, kwargs
        if func is not torch.ops.aten.where.self:  # torch takes it apart by itself only where autograd is on
            return func.decompose(*args)
        cls.references = sys.getrefcount(args[2])
        return args[1]


@cache
def _references_of_temporaries() -> int:
    with _disable_current_modes():
        probe = torch.Tensor._make_wrapper_subclass(_Probe, (1,))
        torch.where(torch.ones(1, dtype=torch.bool), probe, 0.0)
    return _Probe.references
