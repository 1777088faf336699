"""The control socket of a run, and who asks there. Imported when a block is opened, or a run is asked."""

from trimesh._runtime.control.client import RunClient, known_runs
from trimesh._runtime.system.private_folder import credentials_of, entered

__all__ = ["RunClient", "credentials_of", "entered", "known_runs"]
