"""What one rank of `call_settled` came to."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """A value or an error.

    Attributes:
        value: What the endpoint returned, or None after an error.
        error: What it raised, with coordinates, or None.
    """

    value: T | None = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether there was no error."""
        return self.error is None

    def unwrap(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]
