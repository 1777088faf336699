"""Spawner: the process that forks workers, its records, and the begin and end of a worker."""

from trimesh._runtime.spawner.wire import ProcOptions

__all__ = [
    "ProcOptions",
]
