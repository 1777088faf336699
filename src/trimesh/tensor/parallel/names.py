"""The parameters and buffers of a module, each once, with all of its names."""

from __future__ import annotations

import attrs
import torch
from torch import nn


@attrs.frozen
class NamedTensor:
    """A parameter or buffer as a plan sees it.

    Attributes:
        names: All of them: a shared parameter has several.
        size: Of the whole.
        is_parameter: It is no buffer.
        needs_gradient: It is trained.
        tensor: Itself.
    """

    names: tuple[str, ...]
    size: tuple[int, ...]
    is_parameter: bool
    needs_gradient: bool
    tensor: torch.Tensor = attrs.field(repr=False, eq=False)

    @property
    def item_bytes(self) -> int:
        return self.tensor.dtype.itemsize


def named_tensors(module: nn.Module) -> list[NamedTensor]:
    """Return each parameter, then each buffer, of a module."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return [
        NamedTensor(
            tuple(names[id(tensor)]),
            tuple(tensor.size()),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
            tensor,
        )
        for tensor in (*module.parameters(), *module.buffers())
    ]
