"""The whole `Proc` that the running code belongs to, for what stands above the runtime.

The two look-ups are those of `actors/context.py`; rooms below take their process as an argument.
"""

from __future__ import annotations

import contextvars

from trimesh._runtime.actors.context import proc_of_run, proc_of_task, refuse_if_forked
from trimesh._runtime.life.proc import Proc


def find_proc() -> Proc | None:
    """Return the `Proc` that the running task belongs to, or None when there is none yet.

    Raises:
        RuntimeError: There is no Trio run here.
    """
    return proc_of_task.get() or proc_of_run.get()


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
    found = proc_of_task.get() or proc_of_run.get()
    if found is not None:
        return found
    refuse_if_forked()
    raise RuntimeError("a mesh handle works only while the block that owns its processes is open; none is open here")


def proc_for(what: str) -> Proc:
    """Return the `Proc` of the caller, also outside of Trio tasks, for something that needs one.

    Args:
        what: What it is, for the text of the error: "memory is allocated".

    Raises:
        RuntimeError: No mesh is open here.
    """
    found = find_proc_anywhere()
    if found is None:
        refuse_if_forked()
        raise RuntimeError(
            f"{what} while a mesh is open, in an actor or inside the block that owns its processes, got none here: "
            "write async with this_host().spawn_procs(...) around it, "
            "or in a worker thread call it by trio.from_thread.run_sync"
        )
    return found


def proc_in(task_context: contextvars.Context) -> Proc | None:
    """Return the `Proc` that was set in the context of some task, or None."""
    return task_context.get(proc_of_task)
