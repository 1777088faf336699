"""`Operations`: what a mesh tensor is asked for, and rooms above this one do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Operations:
    """Functions that take a mesh tensor first, or what becomes one; `assembly.py` hands them in.

    Attributes:
        issue: Runs an operator of torch on the ranks.
        make_global: Runs a factory of torch, which makes a global tensor.
        upload: Puts a tensor of this process on every rank.
        put_global: Puts one on the ranks as a global tensor.
        whole: Makes a tensor that each rank has a global one.
        reduce, reduce_, slice_mesh, to_mesh, to_local, to_global: See `MeshTensor`.
        list_now, text_now, formatted_now: The values, waited for here.
    """

    issue: Callable[..., Any]
    make_global: Callable[..., Any]
    upload: Callable[..., Any]
    put_global: Callable[..., Any]
    whole: Callable[..., Any]
    reduce: Callable[..., Any]
    reduce_: Callable[..., Any]
    slice_mesh: Callable[..., Any]
    to_mesh: Callable[..., Any]
    to_local: Callable[..., Any]
    to_global: Callable[..., Any]
    list_now: Callable[..., Any]
    text_now: Callable[..., str]
    formatted_now: Callable[..., str]
