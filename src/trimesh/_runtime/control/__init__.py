"""The control socket of a run, and who asks there. Imported when a block is opened, or a run is asked."""

from trimesh._runtime.control.client import RunClient, known_runs

__all__ = ["RunClient", "known_runs"]
