"""What a plan does to activations: how they are laid out anew along one dimension of the mesh around some modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trimesh.errors import ShapeError
from trimesh.tensor.parallel.ring import ring_bytes


@attrs.frozen
class Exchange:
    """One of them: inputs or outputs of modules are to be cut otherwise along a label.

    Attributes:
        pattern: Of names of modules.
        side: Whether it is done to what goes in or to what comes out.
        label: Of the mesh; along all others a tensor stays as it lies.
        kind: "gather" brings parts together, "scatter" adds up parts of a sum where they are cut, "turn" cuts another
            dimension than before: each rank sends something to each.
        dim: Of the tensor, that is cut afterwards; `WHOLE` for none.
        must_fit: The pattern fits a module.
        of_embeddings: Only modules that are tables of rows count.
    """

    pattern: str
    side: Literal["input", "output"]
    label: str
    kind: Literal["gather", "scatter", "turn"]
    dim: int
    must_fit: bool = True
    of_embeddings: bool = False

    def fits(self, name: str, part: nn.Module) -> bool:
        return fnmatchcase(name, self.pattern) and (not self.of_embeddings or isinstance(part, nn.Embedding))

    def is_for(self, value: Any) -> bool:
        """Whether it is done to a value: numbers of classes and the like are left alone."""
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > max(1, self.dim)

    def bytes_sent(self, whole: int, ranks: int) -> int:
        """Return what a rank sends in one direction for `whole` bytes; back it is as much."""
        sent = ring_bytes(whole, ranks)
        return sent // ranks if self.kind == "turn" else sent


def check_exchanges(exchanges: Sequence[Exchange], module: nn.Module, extent: Mapping[str, int]) -> None:
    """Refuse exchanges that do not fit a module and a mesh.

    Raises:
        ShapeError: They do not.
    """
    parts = dict(module.named_modules())
    for one in exchanges:
        if one.label not in extent:
            raise ShapeError(f"a plan names dimensions of the mesh, {list(extent)}, got {one.label!r}")
        if one.must_fit and not any(one.fits(*named) for named in parts.items()):
            raise ShapeError(f"a pattern of a plan must fit a module, got {one.pattern!r} for {list(parts)}")


def activations_sent(
    module: nn.Module,
    exchanges: Sequence[Exchange],
    example: Sequence[torch.Tensor],
    extent: Mapping[str, int],
    batch: Sequence[str],
    contexts: Sequence[str] = (),
) -> dict[str, int]:
    """Return what a rank sends of activations in a forward and a backward pass, by label.

    Args:
        module: Is run on tensors without data.
        exchanges: Of the plan.
        example: Its inputs, whole.
        extent: Of the mesh.
        batch: Labels that its inputs are cut along; each divides what a rank has.
        contexts: Those of them along which the sequence is.
    """
    counting = _Counting(extent, batch)
    if not exchanges and not contexts:
        return counting.found
    twin = copy.deepcopy(module).to("meta")
    for name, part in twin.named_modules():
        for one in exchanges:
            if one.fits(name, part):
                counting.follow(part, one)
    with _Attention(counting, contexts):
        twin(*(one.to("meta") for one in example))
    return counting.found


class _Attention(TorchFunctionMode):
    """Sees each attention of a module, and counts what a plan of contexts moves for it."""

    def __init__(self, counting: _Counting, contexts: Sequence[str]) -> None:
        super().__init__()
        self._counting, self._contexts = counting, contexts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = [*args, *(named[name] for name in ("query", "key", "value")[len(args) :])][:3]
            for label in self._contexts:
                self._counting.attention(label, query, (key, value))
        return func(*args, **named)


class _Counting:
    """Counts what exchanges of a forward pass, and of the backward pass after it, send."""

    def __init__(self, extent: Mapping[str, int], batch: Sequence[str]) -> None:
        self._extent, self._batch = extent, batch
        self._gathered: list[tuple[str, torch.Tensor]] = []
        self.found = dict.fromkeys(extent, 0)

    def follow(self, part: nn.Module, one: Exchange) -> None:
        if one.side == "input":
            part.register_forward_pre_hook(lambda _, args: self._count_all(one, args))
        else:
            part.register_forward_hook(lambda _part, _args, made: self._count_all(one, (made,)))

    def attention(self, label: str, query: torch.Tensor, keys: Sequence[torch.Tensor]) -> None:
        """Count keys and values that are brought together along a label, and their gradients."""
        others = prod(self._extent[one] for one in self._batch if one != label)
        has_gradient = query.requires_grad or any(one.requires_grad for one in keys)
        for one in keys:
            sent = ring_bytes(one.numel() * one.element_size() // others, self._extent[label])
            self.found[label] += sent * (3 if has_gradient else 1)

    def _count_all(self, one: Exchange, values: Sequence[Any]) -> None:
        for value in values:
            if one.is_for(value):
                self._count(one, value)

    def _count(self, one: Exchange, value: torch.Tensor) -> None:
        if one.kind == "gather" and value.grad_fn is not None:
            if any(label == one.label and other is value for label, other in self._gathered):
                return  # modules side by side share what was brought together
            self._gathered.append((one.label, value))
        others = prod(self._extent[label] for label in self._batch if label != one.label)
        sent = one.bytes_sent(value.numel() * value.element_size() // others, self._extent[one.label])
        self.found[one.label] += sent * (2 if value.requires_grad else 1)
