"""How many bytes a value has, about: without encoding it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 4
"""Containers inside of containers that are looked into: what lies deeper counts as its reference."""


def estimate_bytes(value: Any, depth: int = DEPTH_MAX) -> int:
    """Return the bytes of a value: exact for bytes, arrays and tensors, an estimate for containers and objects."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    total = sys.getsizeof(value)
    parts: Any = value
    if depth:
        if isinstance(value, Mapping):
            total += sum(estimate_bytes(key, 0) + estimate_bytes(one, depth - 1) for key, one in parts.items())
        elif isinstance(value, list | tuple | set | frozenset):
            total += sum(estimate_bytes(one, depth - 1) for one in parts)
        elif (fields := getattr(value, "__dict__", None)) is not None:
            total += estimate_bytes(fields, depth - 1)
    return total
