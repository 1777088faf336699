"""Packages on every host: what a file of requirements says, and the environment that a host makes of it."""

from trimesh.jobs.packages.installing import Installation, install

__all__ = ["Installation", "install"]
