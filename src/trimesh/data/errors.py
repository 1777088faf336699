"""`DataError`: data that cannot be what a stream gives."""

from __future__ import annotations


class DataError(ValueError):
    """A source has something of which there are no tensors, or is not the one that a stream has begun with."""
