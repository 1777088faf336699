"""`trimesh top`: what the processes of a run do, again and again."""

from trimesh.cli.top.command import top

__all__ = ["top"]
