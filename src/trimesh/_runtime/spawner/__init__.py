"""Spawner: the process that forks workers, its records, and the begin and end of a worker."""

from trimesh._runtime.spawner.proc_options import ProcOptions

__all__ = [
    "ProcOptions",
]
