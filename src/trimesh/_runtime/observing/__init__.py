"""What a run tells who looks on: tables of its processes and calls, its control socket."""

from trimesh._runtime.observing.client import RunClient, known_runs

__all__ = ["RunClient", "known_runs"]
