"""Random numbers whose state can be saved."""

from __future__ import annotations

_MASK = (1 << 64) - 1


class Draws:
    """Numbers in [0, 1) that follow from a seed (splitmix64).

    Attributes:
        state: All that the next numbers depend on.
    """

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def next(self) -> float:
        """Return the next number."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
