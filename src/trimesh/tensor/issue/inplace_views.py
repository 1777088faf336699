"""The operators that give a tensor another shape in place without touching its data, as `squeeze_` does.

The ranks make a view instead, and the handle goes over to it: the memory is the same, and a part of a global tensor
could not change its shape in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.utils._mode_utils import no_dispatch

from trimesh.tensor.controller.changed_bases import note_change
from trimesh.tensor.controller.tensor import MeshTensor

aten = torch.ops.aten

_VIEWS: Final[dict[Any, Any]] = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def _change(func: Any, view: Any, tensor: MeshTensor, *args: Any, **kwargs: Any) -> MeshTensor:
    viewed = view(tensor, *args, **kwargs)
    _relook(func, (tensor, *args), kwargs)
    tensor._held, tensor._meta = viewed._held, viewed._meta
    if func is not aten.detach_.default and not tensor.is_inference():
        is_moved = func is aten.as_strided_.default and (*args, *kwargs.values())[2:] not in ((), (None,))
        # Torch counts it when this is done. Without gradients it finds the history of a view anew after it.
        note_change(tensor, version=tensor._version + 1 if torch.is_grad_enabled() else -1, is_moved=is_moved)
    return tensor


def _relook(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run the very operator on the handle, which has no data, so that it looks as the view does.

    Torch's own wrapper subclasses do so in `return_and_correct_aliasing`.
    """
    with no_dispatch():
        was = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)  # noqa: FBT003 - torch takes it so
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was)


INPLACE_VIEWS: Final[dict[Any, Callable[..., MeshTensor]]] = {
    func: partial(_change, func, view) for func, view in _VIEWS.items()
}
"""What is called in the place of each."""
