"""Spawner: the process that forks workers, its messages, and the first and last moments of a worker."""

from trimesh._runtime.spawner.wire import ProcOptions

__all__ = [
    "ProcOptions",
]
