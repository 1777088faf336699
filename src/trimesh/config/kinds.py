"""What the value of a setting may be, in Python or TOML and as the text of an environment variable."""

from __future__ import annotations

from typing import Any, Protocol, cast

import msgspec

from trimesh.plain_numbers import real_number, whole_number


class Kind(Protocol):
    """The values that one setting may have."""

    @property
    def known(self) -> str:
        """What is right, for a text that goes on with `, got ...`."""
        ...

    def check(self, value: Any) -> Any:
        """Return a value as it is kept.

        Raises:
            ValueError: It is none of these; the text is not used.
        """
        ...

    def read(self, text: str) -> Any:
        """Return the value that a text of the environment stands for, not yet checked."""
        ...


class Seconds(msgspec.Struct, frozen=True):
    """A time; infinite where `may_wait`, left to trimesh where `may_be_none`."""

    may_wait: bool = False
    may_be_none: bool = False

    @property
    def known(self) -> str:
        """What is right."""
        return "a number of seconds >= 0" + (" (inf waits for ever)" if self.may_wait else "")

    def check(self, value: Any) -> float | None:
        """Return the seconds."""
        if value is None and self.may_be_none:
            return None
        found = real_number(value)
        if found is None or not found >= 0 or (found == float("inf") and not self.may_wait):
            raise ValueError
        return found

    def read(self, text: str) -> float:
        """Read a number."""
        return float(text)


class Count(msgspec.Struct, frozen=True):
    """A whole number from 1 to `most`."""

    most: int

    @property
    def known(self) -> str:
        """What is right."""
        return f"a whole number from 1 to {self.most}"

    def check(self, value: Any) -> int:
        """Return the number."""
        found = whole_number(value)
        if found is None or not 1 <= found <= self.most:
            raise ValueError
        return found

    def read(self, text: str) -> int:
        """Read a number."""
        return int(text)


class Choice(msgspec.Struct, frozen=True):
    """One of some words."""

    words: tuple[str, ...]

    @property
    def known(self) -> str:
        """What is right."""
        return f"one of {', '.join(self.words)}"

    def check(self, value: Any) -> str:
        """Return the word."""
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value

    def read(self, text: str) -> str:
        """Take the word."""
        return text


class Names(msgspec.Struct, frozen=True):
    """Some names, of `words` if there are any."""

    words: tuple[str, ...] = ()

    @property
    def known(self) -> str:
        """What is right."""
        of = f"some of {', '.join(self.words)}" if self.words else "names"
        return f"{of}: a list of texts, in the environment separated by commas"

    def check(self, value: Any) -> tuple[str, ...]:
        """Return the names, in their order."""
        if not isinstance(value, list | tuple):
            raise ValueError  # noqa: TRY004 - of one kind with the others: the text is made elsewhere
        names = tuple(cast("list[Any]", value))
        for name in names:
            if not isinstance(name, str) or not name or (self.words and name not in self.words):
                raise ValueError
        return names

    def read(self, text: str) -> list[str]:
        """Split at commas."""
        return [name.strip() for name in text.split(",") if name.strip()]


class Text(msgspec.Struct, frozen=True):
    """Any text; an address if `is_address`."""

    known: str = "a text"
    is_address: bool = False

    def check(self, value: Any) -> str:
        """Return the text."""
        if not isinstance(value, str):
            raise ValueError  # noqa: TRY004 - as above
        if value and self.is_address:
            import ipaddress  # noqa: PLC0415 - `import trimesh` stays cheap

            ipaddress.ip_address(value)
        return value

    def read(self, text: str) -> str:
        """Take the text."""
        return text
