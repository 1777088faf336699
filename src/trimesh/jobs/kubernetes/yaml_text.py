"""Plain values as YAML, for people: blocks, and strings in double quotes, as JSON writes them; PURE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

_PLAIN: Final = re.compile(r"[A-Za-z][\w./-]*")
_WORDS: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""What YAML 1.1 takes for something else than text."""


def yaml_text(value: Any) -> str:
    """Return a value of mappings, lists, strings, numbers, booleans and None as one YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    match value:
        case {**items} if items:
            for key, item in items.items():
                yield from _item(f"{_scalar(key)}:", item, is_nested=not isinstance(item, list))
        case [*members] if members:
            for member in members:
                first, *rest = _lines(member)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
        case _:
            yield _scalar(value)


def _item(head: str, item: Any, *, is_nested: bool) -> Iterator[str]:
    if not isinstance(item, dict | list) or not item:
        yield f"{head} {_scalar(cast('Any', item))}"
        return
    yield head
    for line in _lines(cast("Any", item)):
        yield f"  {line}" if is_nested else line


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    written = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in written)
