"""The arguments of an operator with global tensors among them, and what its schema says of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_global(value: Any) -> TypeGuard[DTensor]:
    return isinstance(value, torch.Tensor) and hasattr(value, "_local_tensor")


def globals_in(tree: Any) -> list[DTensor]:
    """Return the global tensors in arguments, in order."""
    return [one for one in tensors_in(tree) if hasattr(one, "_local_tensor")]


def tensors_in(tree: Any) -> list[Any]:
    """Return the tensors in arguments, in order."""
    found: list[Any] = []
    _collect((tree,), found)
    return found


def _collect(values: Iterable[Any], found: list[Any]) -> None:
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            _collect(one, found)
        elif isinstance(one, dict):
            _collect(one.values(), found)


def replaced(tree: Any, parts: Iterator[Any]) -> Any:
    """Return arguments with other values in the place of global tensors, in order."""
    if is_global(tree):
        return next(parts)
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(part, parts) for part in tree])
    if isinstance(tree, dict):
        return {name: replaced(part, parts) for name, part in tree.items()}
    return tree


def key_of(tree: Any, *, vary: bool) -> Any:
    """Return what a way depends on of arguments that are no tensors, and where tensors are."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return (kind, *[key_of(one, vary=vary) for one in tree])
    if kind is dict:
        return tuple((name, key_of(one, vary=vary)) for name, one in tree.items())
    if vary and (kind is float or kind is int):
        return kind
    if kind is float or kind is complex:
        return kind, repr(tree)  # -0.0 equals 0.0, and nan nothing
    return torch.Tensor if is_global(tree) else (kind, tree)


def bound(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by their names in the schema."""
    found: dict[str, Any] = {}
    for place, one in enumerate(operator._schema.arguments):
        if place < len(args):
            found[one.name] = args[place]
        elif one.name in kwargs:
            found[one.name] = kwargs[one.name]
        else:
            found[one.name] = one.default_value
    return found


def plain_name(operator: Any) -> str:
    """Return the name of an operator without overload, and of one that writes to its argument that of the other."""
    name: str = operator._schema.name.partition("::")[2]
    if name.startswith("__"):
        return name
    return name.rstrip("_")


def _writes(operator: Any) -> Iterator[tuple[int, Any]]:
    for place, one in enumerate(operator._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield place, one


def has_out(operator: Any) -> bool:
    """Whether an operator writes to tensors that are given only for that."""
    return any(one.kwarg_only for _, one in _writes(operator))


def written_in(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, DTensor]:
    """Return the global tensors that an operator writes to, by identity."""
    found: dict[int, DTensor] = {}
    names = {one.name: place for place, one in enumerate(operator._schema.arguments)}
    for place, one in _writes(operator):
        if one.name == "grads" and "grad_scale" in names and kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes to them only to scale them
        value = args[place] if place < len(args) else kwargs.get(one.name)
        for each in globals_in(value):
            found[id(each)] = each
    return found


def makes_views(operator: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in operator._schema.returns)
