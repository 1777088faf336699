"""Jobs that stay after the program that has started them: a keeper holds their hosts, and programs attach to them."""

from trimesh.jobs.kept.kept_job import AttachedJob, KeptJob, attach, extend, keep, kept, stop

__all__ = ["AttachedJob", "KeptJob", "attach", "extend", "keep", "kept", "stop"]
