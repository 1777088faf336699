"""Implementations of `HostMesh.run`, `shell`, `forward`, `sync` and `install`, loaded when one is first used."""

from trimesh.jobs.code import sync
from trimesh.jobs.on_hosts.commands import run
from trimesh.jobs.on_hosts.forwarding import Forwarding, forward
from trimesh.jobs.on_hosts.shells import shell
from trimesh.jobs.packages import install

__all__ = ["Forwarding", "forward", "install", "run", "shell", "sync"]
