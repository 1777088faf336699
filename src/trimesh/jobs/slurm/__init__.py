"""Hosts that are nodes of Slurm."""

from trimesh.jobs.slurm.job import SlurmJob

__all__ = ["SlurmJob"]
