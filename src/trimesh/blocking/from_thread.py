"""Async handles of `trimesh` used from a thread: `trimesh.from_thread.run(function, *args)`."""

from __future__ import annotations

from trimesh.blocking.calls import run

__all__ = ["run"]
