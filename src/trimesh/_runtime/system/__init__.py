"""This process and its children, as the operating system sees them: started, watched, ended, diagnosed."""

from trimesh._runtime.system.child import checked_output
from trimesh._runtime.system.run_process import run_process
from trimesh._runtime.system.seeds import SEED_MAX

__all__ = [
    "SEED_MAX",
    "checked_output",
    "run_process",
]
