"""What the methods of a mesh of hosts do beside spawning: commands, a shell, ports, code of the program, packages."""

from trimesh.jobs.code import sync
from trimesh.jobs.on_hosts.commands import run
from trimesh.jobs.on_hosts.forwarding import Forwarding, forward
from trimesh.jobs.on_hosts.shells import shell
from trimesh.jobs.packages import install

__all__ = ["Forwarding", "forward", "install", "run", "shell", "sync"]
