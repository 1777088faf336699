"""What one call of a pool may say beside its arguments."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

WhenFull = Literal["wait", "refuse"]
PauseMode = Literal["keep", "wait", "abort"]


class CallOptions(msgspec.Struct, frozen=True):
    """Options of a call; see `Pool.options`.

    Attributes:
        priority: Higher ones go first.
        cost: Weight in the load of the replica.
        group: Name by which it can be cancelled.
        when_full: What to do when the queue is full.
        session: Name of the session.
    """

    priority: int = 0
    cost: float = 1.0
    group: Any = None
    when_full: WhenFull = "wait"
    session: str | None = None

    def check(self) -> None:
        """Refuse what is out of bounds.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is out of its bounds.
        """
        if not isinstance(self.priority, int):
            raise TypeError(f"priority must be a whole number, got {self.priority!r}")
        if not 0 < self.cost < math.inf:
            raise ValueError(f"cost must be a positive number, got {self.cost!r}")
        if self.when_full not in get_args(WhenFull):
            raise ValueError(f'when_full must be "wait" or "refuse", got {self.when_full!r}')


def checked_mode(mode: Any) -> PauseMode:
    """Return a way to pause.

    Raises:
        ValueError: It is none.
    """
    if mode not in get_args(PauseMode):
        raise ValueError(f'a pool is paused by "keep", "wait" or "abort", got {mode!r}')
    return mode  # type: ignore[no-any-return]
