"""How long to wait before the next attempt."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trimesh.plain_numbers import plain_real


def _check_seconds(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"Backoff({attribute.name}=...) must be a number of seconds >= 0, got {value!r}")


def _check_factor(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ValueError(f"Backoff(factor=...) must be a number >= 1, got {value!r}")


def _check_jitter(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"Backoff(jitter=...) must be a number between 0 and 1, got {value!r}")


@attrs.frozen
class Backoff:
    """The wait before each restart of one unit: `initial`, then `factor` times as long each time, at most `cap`.

    Attributes:
        initial: Seconds before the first restart.
        cap: Seconds that no wait exceeds.
        factor: From one wait to the next.
        jitter: Part of the wait, 0 to 1, that chance may take off it, so that what failed together does not start
            together.

    Raises:
        ValueError: A number is outside of its range.
    """

    initial: float = attrs.field(default=0.1, converter=plain_real, validator=_check_seconds)
    cap: float = attrs.field(default=5.0, converter=plain_real, validator=_check_seconds)
    factor: float = attrs.field(default=2.0, converter=plain_real, validator=_check_factor)
    jitter: float = attrs.field(default=0.1, converter=plain_real, validator=_check_jitter)

    def delay(self, attempt: int, luck: float = 0.0) -> float:
        """Return the seconds to wait.

        Args:
            attempt: 1 for the first failure of the period.
            luck: Between 0 and 1, drawn by the caller.
        """
        try:
            wait = self.initial * self.factor ** (attempt - 1)
        except OverflowError:
            wait = self.cap if self.initial else 0.0
        return min(wait, self.cap) * (1.0 - self.jitter * luck)
