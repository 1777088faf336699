"""Kept jobs: a keeper process holds their hosts after the program that started them, and programs attach to them."""

from trimesh.jobs.kept.kept_job import AttachedJob, KeptJob, attach, extend, keep, kept, stop

__all__ = ["AttachedJob", "KeptJob", "attach", "extend", "keep", "kept", "stop"]
