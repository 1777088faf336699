"""Synchronization of the program's code to hosts: scanning, transfer of missing files, and the folder on each host."""

from trimesh.jobs.code.folder import synced
from trimesh.jobs.code.syncing import CodeSync, sync

__all__ = ["CodeSync", "sync", "synced"]
