"""What the value of a setting may be, in Python or TOML and as the text of an environment variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from trimesh.plain_numbers import real_number, whole_number


class Kind(msgspec.Struct, frozen=True):
    """The values that one setting may have.

    Attributes:
        known: The right ones, for a text that goes on with `, got ...`.
        check: Returns a value as it is kept; raises ValueError, whose text is not used, for any other.
        read: Returns the value that a text of the environment stands for, not yet checked.
        unit: Of a number; else empty.
    """

    known: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    unit: str = ""


def seconds(*, may_wait: bool = False, may_be_none: bool = False) -> Kind:
    """Return the kind of a time; infinite where `may_wait`, left to trimesh where `may_be_none`."""

    def check(value: Any) -> float | None:
        if value is None and may_be_none:
            return None
        found = real_number(value)
        if found is None or not found >= 0 or (found == float("inf") and not may_wait):
            raise ValueError
        return found

    return Kind("a number of seconds >= 0" + (" (inf waits for ever)" if may_wait else ""), check, float, "seconds")


def items(most: int) -> Kind:
    """Return the kind of a whole number from 1 to `most`."""

    def check(value: Any) -> int:
        found = whole_number(value)
        if found is None or not 1 <= found <= most:
            raise ValueError
        return found

    return Kind(f"a whole number from 1 to {most}", check, int, "items")


def choice(*words: str) -> Kind:
    """Return the kind of one of some words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(words)}", check)


def names(*words: str) -> Kind:
    """Return the kind of some names in their order, of `words` if there are any."""

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError  # noqa: TRY004 - of one kind with the others: the text is made elsewhere
        found = tuple(cast("list[Any]", value))
        for name in found:
            if not isinstance(name, str) or not name or (words and name not in words):
                raise ValueError
        return found

    def read(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    of = f"some of {', '.join(words)}" if words else "names"
    return Kind(f"{of}: a list of texts, in the environment separated by commas", check, read)


def text(known: str = "a text", *, is_address: bool = False) -> Kind:
    """Return the kind of any text; of an address if `is_address`."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError  # noqa: TRY004 - as above
        if value and is_address:
            import ipaddress  # noqa: PLC0415 - `import trimesh` stays cheap

            ipaddress.ip_address(value)
        return value

    return Kind(known, check)
