"""Where the running code is: its process, and inside an actor its mesh, coordinates and call.

Two look-ups make one process able to hold several `Proc` objects (simulation): a context variable, set for
everything that a simulated process runs, comes before the one `Proc` of the Trio run.
"""

from __future__ import annotations

import contextvars
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh.shape.point import Point

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc

_proc_of_task: ContextVar[Proc | None] = ContextVar("trimesh_proc", default=None)
_proc_of_run: trio.lowlevel.RunVar[Proc | None] = trio.lowlevel.RunVar("trimesh_proc", default=None)
_cell: ContextVar[Cell | None] = ContextVar("trimesh_cell", default=None)
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


def find_proc() -> Proc | None:
    """Return the `Proc` that the running task belongs to, or None when there is none yet.

    Raises:
        RuntimeError: There is no Trio run here.
    """
    found = _proc_of_task.get()
    return found if found is not None else _proc_of_run.get()


def find_proc_anywhere() -> Proc | None:
    """Return the `Proc` of the running task, or None when there is none, or no Trio run at all."""
    try:
        return find_proc()
    except RuntimeError:
        return None


def current_proc() -> Proc:
    """Return the `Proc` that the running task belongs to.

    Raises:
        RuntimeError: No mesh is open in this Trio run.
    """
    found = find_proc()
    if found is None:
        raise RuntimeError(
            "a mesh handle works only while the block that owns its processes is open; none is open here"
        )
    return found


def proc_for(what: str) -> Proc:
    """Return the `Proc` of the caller, also outside of Trio tasks, for something that needs one.

    Args:
        what: What it is, for the text of the error: "memory is allocated".

    Raises:
        RuntimeError: No mesh is open here.
    """
    found = find_proc_anywhere()
    if found is None:
        raise RuntimeError(
            f"{what} while a mesh is open, in an actor or inside the block that owns its processes, got none here: "
            "write async with this_host().spawn_procs(...) around it, "
            "or in a worker thread call it by trio.from_thread.run_sync"
        )
    return found


def proc_in(task_context: contextvars.Context) -> Proc | None:
    """Return the `Proc` that was set in the context of some task, or None."""
    return task_context.get(_proc_of_task)


def cell_in(task_context: contextvars.Context) -> Cell | None:
    """Return the actor that was set in the context of some task, or None."""
    return task_context.get(_cell)


def set_proc_of_run(proc: Proc | None) -> None:
    """Make `proc` the one of this Trio run."""
    _proc_of_run.set(proc)


def set_proc_of_task(proc: Proc) -> Token[Proc | None]:
    """Make `proc` the one of the running task and of all tasks that it will start."""
    return _proc_of_task.set(proc)


def set_context(value: Context | None) -> None:
    """Set what `context()` returns in the running task."""
    _context.set(value)


def find_cell() -> Cell | None:
    """Return the actor that the running task belongs to, or None when it belongs to none."""
    return _cell.get()


def set_cell(cell: Cell) -> None:
    """Make the running task, and all that it will start, part of an actor."""
    _cell.set(cell)
