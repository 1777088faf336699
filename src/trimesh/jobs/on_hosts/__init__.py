"""What the methods of a mesh of hosts do beside spawning: commands on each host."""

from trimesh.jobs.on_hosts.running import run

__all__ = ["run"]
