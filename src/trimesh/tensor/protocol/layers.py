"""Linear layers as operators of one name, for tensors of any number of dimensions.

Torch takes `linear` apart before anything sees it: batch and sequence are folded into one dimension, and parts of a
sequence are no parts of that. Autograd knows nothing of these: `ops/training/linear_layers.py` has the derivatives.
"""

from __future__ import annotations

from typing import Any, Final

import torch

NAMESPACE: Final = "trimesh_tensor"

_of_torch: Final[Any] = torch.library
_library: Final = _of_torch.Library(NAMESPACE, "DEF")
_library.define("linear_layer(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.define("linear_weight_gradient(Tensor grad, Tensor input) -> Tensor")


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(value, weight, bias).contiguous()


def _linear_weight_gradient(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return grad.reshape(-1, grad.size(-1)).t() @ value.reshape(-1, value.size(-1))


_library.impl("linear_layer", _linear, "CompositeExplicitAutograd")
_library.impl("linear_weight_gradient", _linear_weight_gradient, "CompositeExplicitAutograd")

_operators: Final[Any] = getattr(torch.ops, NAMESPACE)

linear: Final = _operators.linear_layer.default
"""`nn.functional.linear`; what it makes is contiguous."""

linear_weight_gradient: Final = _operators.linear_weight_gradient.default
"""The gradient of its weight: the product of both, summed over all dimensions but the last."""
