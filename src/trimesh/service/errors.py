"""Errors of services."""

from __future__ import annotations

from trimesh.errors import MeshError


class Paused(MeshError):
    """A request that ran was aborted, because the pool was paused by `paused("abort")`; it may be made again."""
