"""Code of the program on every host: its files, what a host is missing, and the folder that processes import from."""

from trimesh.jobs.code.folder import synced
from trimesh.jobs.code.syncing import CodeSync, sync

__all__ = ["CodeSync", "sync", "synced"]
