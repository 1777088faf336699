"""The process that forks workers, the messages to it, and the first and last moments of a worker."""

from trimesh._runtime.spawner.wire import ProcOptions

__all__ = [
    "ProcOptions",
]
