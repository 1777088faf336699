"""Actors of this process: mailboxes, endpoints at work, the agent that spawns them, what is said of their failures."""

from trimesh._runtime.actors.cell import Cell, find_cell
from trimesh._runtime.actors.context import (
    Context,
    context,
    current_point,
    current_rank,
    current_size,
    set_proc_of_task,
)
from trimesh._runtime.actors.life import LIVE, lifespan_of

__all__ = [
    "LIVE",
    "Cell",
    "Context",
    "context",
    "current_point",
    "current_rank",
    "current_size",
    "find_cell",
    "lifespan_of",
    "set_proc_of_task",
]
