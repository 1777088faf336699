"""Runs of a simulation under many seeds in one test."""

from __future__ import annotations

from collections.abc import Callable


def run_hundred(hundred: int, run_seed: Callable[[int], None]) -> None:
    """Run a hundred seeds; a failure says which."""
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        try:
            run_seed(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
