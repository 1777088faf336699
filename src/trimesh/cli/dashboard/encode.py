"""Rows as JSON whose texts steer nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from trimesh.cli.text import clean

_NUMBERS: Final = {int, float}
_encode = msgspec.json.Encoder().encode


def page_json(value: object) -> bytes:
    """Return a value as JSON: in every text and name of it, characters that are not to be seen are escapes (DX-3)."""
    return _encode(_cleaned(msgspec.to_builtins(value)))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else clean(value)
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {_cleaned(key): _cleaned(one) for key, one in pairs}
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return items if set(map(type, items)) <= _NUMBERS else [_cleaned(one) for one in items]
    return value
