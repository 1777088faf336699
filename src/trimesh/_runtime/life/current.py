"""Look-up of the `Proc` that the running code belongs to, for packages above the runtime.

`actors/context.py` implements both look-ups; rooms below receive their process as an argument.
"""

from __future__ import annotations

import contextvars
import sys
from typing import TYPE_CHECKING, Any, TextIO

from trimesh._runtime.actors.context import proc_of_run, proc_of_task, refuse_if_forked
from trimesh._runtime.tasks.crossing import in_trio_now

if TYPE_CHECKING:
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
    raise RuntimeError(
        "a mesh handle works only inside the block that owns its processes, got a call with no block open: "
        "move it into `async with this_host().spawn_procs(...)`"
    )


def proc_for(what: str) -> Proc:
    """Return the `Proc` of the caller, also outside of Trio tasks, for something that needs one.

    Args:
        what: The operation, as the error text names it: "memory is allocated".

    Raises:
        RuntimeError: No mesh is open here.
    """
    found = find_proc_anywhere()
    if found is None:
        refuse_if_forked()
        raise RuntimeError(
            f"{what} only while a mesh is open, in an actor or inside the block that owns its processes, got none "
            "here: write `async with this_host().spawn_procs(...)` around it; in a worker thread, call it with "
            "`trio.from_thread.run_sync`"
        )
    return found


def proc_in(task_context: contextvars.Context) -> Proc | None:
    """Return the `Proc` set in the context of a task, or None."""
    return task_context.get(proc_of_task)


# ---- `trimesh.dump`: waits of the caller's process -------------------------------------------------------------------


def dump(file: TextIO | None = None) -> None:
    """Write a report of what this process waits for, and what its actors and child processes do.

    It lists blocks that are being left; for every child process its running and queued calls, its tasks with what they
    await, its threads, and the stack of a busy main thread; every unended call and `Port.send` of this process,
    including calls that were given up and may still run.

    Args:
        file: Destination; standard error if None.

    Blocking: not a checkpoint; with child processes until each has answered, at most 0.5 s.
    A process that is stopped, or holds the GIL in C, does not answer.
    """
    in_trio_now(_dump)(file if file is not None else sys.stderr)


def _dump(out: TextIO) -> None:
    from trimesh._runtime.watch.report import write_report  # noqa: PLC0415 - few programs dump

    write_report(find_proc(), out)


# ---- rebuilding ------------------------------------------------------------------------------------------------------

# Pickles refer to `rebuild` for objects of packages above, so that decoding one does not import that package by name.


def rebuild(name: str, *fields: Any) -> Any:
    """Rebuild an object from its fields with the service `name` of this process; see `Handler.rebuild`."""
    return current_proc().services.rebuild(name, fields)
