"""Handles between two programs of one user on one host."""

from trimesh.programs.handles import connect, publish_as

__all__ = ["connect", "publish_as"]
