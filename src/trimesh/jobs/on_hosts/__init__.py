"""What the methods of a mesh of hosts do beside spawning: commands on each host, ports that lead to one."""

from trimesh.jobs.on_hosts.forwarding import Forwarding, forward
from trimesh.jobs.on_hosts.running import run

__all__ = ["Forwarding", "forward", "run"]
