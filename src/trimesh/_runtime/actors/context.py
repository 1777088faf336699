"""Where the running code is: its process, and inside an actor its mesh, coordinates and call.

Two look-ups make one process able to hold several `Proc` objects (simulation): a context variable, set for
everything that a simulated process runs, comes before the one `Proc` of the Trio run. `life/current.py` looks them up.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh.shape.point import Point

if TYPE_CHECKING:
    from trimesh._runtime.actors.process import ActorProc

proc_of_task: ContextVar[ActorProc | None] = ContextVar("trimesh_proc", default=None)
proc_of_run: trio.lowlevel.RunVar[ActorProc | None] = trio.lowlevel.RunVar("trimesh_proc", default=None)
_context: ContextVar[Context | None] = ContextVar("trimesh_context", default=None)


@attrs.frozen
class Context:
    """What an endpoint can know about itself.

    Attributes:
        point: Own coordinates in the mesh as spawned.
        mesh: Name of the actor mesh (of the process mesh, in `setup`).
        actor: The actor object, or None outside of one.
        endpoint: Name of the endpoint that runs, or None in `__init__`, `lifespan` and `setup`.
        incarnation: 0 for the first process at this point, one more for each restart.
    """

    point: Point
    mesh: str
    actor: Any = None
    endpoint: str | None = None
    incarnation: int = 0


def context() -> Context:
    """Return the context of the running endpoint, `__init__`, `lifespan` or `setup`.

    Raises:
        RuntimeError: The caller is not part of an actor or worker process.
    """
    found = _context.get()
    if found is None:
        raise RuntimeError(
            "context() is known only inside an endpoint, __init__, lifespan or setup function of a mesh; "
            "the program that spawned the mesh is at no point of it"
        )
    return found


def current_point() -> Point:
    """Return the coordinates of the running member, in the extent of its mesh as spawned."""
    return context().point


def current_rank() -> int:
    """Return the row-major rank of the running member in its mesh as spawned."""
    return context().point.rank


def current_size(dim: str | None = None) -> int:
    """Return the number of members of the running member's mesh as spawned, or its size along `dim`.

    Raises:
        ShapeError: `dim` is no dimension of the mesh.
    """
    point = context().point
    return point.extent.nelements if dim is None else point.size(dim)


def set_proc_of_run(proc: ActorProc | None) -> None:
    """Make `proc` the one of this Trio run."""
    proc_of_run.set(proc)


def set_proc_of_task(proc: ActorProc) -> Token[ActorProc | None]:
    """Make `proc` the one of the running task and of all tasks that it will start."""
    return proc_of_task.set(proc)


def set_context(value: Context | None) -> None:
    """Set what `context()` returns in the running task."""
    _context.set(value)
