"""Errors of the tensor engine that have no better name elsewhere."""

from __future__ import annotations

from typing import Final

from trimesh.errors import TrimeshError

PROCESS_ENDED: Final = "a process of the group has ended"
"""What `CollectiveFailed` says where that is why."""


class RecordingError(TrimeshError):
    """A function cannot be recorded, or not be replayed with such arguments: see the text."""
