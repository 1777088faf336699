"""Implementations of `HostMesh.run`, `shell`, `forward`, `sync`, `install` and `spmd.from_torchrun`, loaded on use."""

from trimesh.jobs.code import sync
from trimesh.jobs.on_hosts.commands import run
from trimesh.jobs.on_hosts.forwarding import Forwarding, forward
from trimesh.jobs.on_hosts.shells import shell
from trimesh.jobs.packages import install
from trimesh.jobs.torchrun import from_torchrun

__all__ = ["Forwarding", "forward", "from_torchrun", "install", "run", "shell", "sync"]
