"""Actors of this process: mailboxes, servers of endpoints, the agent that spawns them, failure reports."""

from trimesh._runtime.actors.cell import LIVE, Cell, ServeSlot, find_cell, lifespan_of
from trimesh._runtime.actors.context import (
    ExecutionContext,
    OwnMeshes,
    caller_here,
    current_point,
    current_rank,
    current_size,
    execution_context,
    message_here,
    runs_with_meshes,
    set_proc_of_task,
)
from trimesh._runtime.actors.server import Reply

__all__ = [
    "LIVE",
    "Cell",
    "ExecutionContext",
    "OwnMeshes",
    "Reply",
    "ServeSlot",
    "caller_here",
    "current_point",
    "current_rank",
    "current_size",
    "execution_context",
    "find_cell",
    "lifespan_of",
    "message_here",
    "runs_with_meshes",
    "set_proc_of_task",
]
