"""The operators that give a tensor another shape in place without touching its data, as `squeeze_` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten

INPLACE_VIEWS: Final[frozenset[Any]] = frozenset(
    {
        aten.as_strided_.default,
        aten.detach_.default,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.t_.default,
        aten.transpose_.default,
        aten.unsqueeze_.default,
    }
)


def relook(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Let the handle at the controller look as the ranks' tensors do after `func`, one of the above.

    Runs the very operator on the handle, which has no data, without coming back here: torch's own wrapper subclasses
    do so in `return_and_correct_aliasing`.
    """
    with no_dispatch():
        was = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)  # noqa: FBT003 - torch takes it so
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was)
