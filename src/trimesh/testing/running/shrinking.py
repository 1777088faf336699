"""Find the few faults and steps that a failure needs, by running the same seed without the others. PURE.

Delta debugging: leave out half of them, then the other half, then quarters, and so on; what still fails goes on
with less. The schedule of tasks is the seed's and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def smallest(keys: Sequence[str], fails: Callable[[Sequence[str]], bool], runs_max: int) -> list[str]:
    """Return a part of `keys` with which it still fails and none of which can be left out.

    Args:
        keys: Of faults, or of steps; with all of these it fails.
        fails: Runs it with some of them.
        runs_max: How often; what has been reached by then is returned.
    """
    kept, parts, runs = list(keys), 1, 0
    while kept and parts <= len(kept):
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            if runs >= runs_max:
                return kept
            runs += 1
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, parts = rest, max(1, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return kept
