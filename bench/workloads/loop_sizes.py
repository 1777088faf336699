"""Sizes of the loop, the same on all sides."""

from __future__ import annotations

from bench.scale import Scale

GENERATORS = 4
WORKERS = 64
"""Rollouts that are under way at once."""

BATCH = 64
STALENESS = 1
WEIGHTS = 1024
"""Bytes."""


def rollouts_of(scale: Scale) -> int:
    """Return how many rollouts one rate is taken of: of whole batches."""
    return max(1, scale.rate_calls // BATCH) * BATCH
