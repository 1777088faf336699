"""Warnings for CUDA features that were never run on a device, once per process."""

from __future__ import annotations

import warnings

_said = set[str]()


def warn_untried(what: str, how: str = "run `make test-cuda` in a checkout of trimesh on this machine") -> None:
    """Warn, once for each feature, that it has not run on a CUDA device yet, and how to try it.

    Args:
        what: Name of the feature, as the subject of a sentence.
        how: Instruction for a test of it, as an imperative.
    """
    if what in _said:
        return
    _said.add(what)
    warnings.warn(
        f"{what} has been tested without a CUDA device only: compare its results with those on the CPU first, "
        f"{how}, and report what fails",
        stacklevel=2,
    )
