"""Errors of the tensor engine that have no better name elsewhere."""

from __future__ import annotations

from trimesh.errors import TrimeshError


class RecordingError(TrimeshError):
    """A function cannot be recorded, or not be replayed with such arguments: see the text."""
