"""The whole `Proc` that the running code belongs to, for what stands above the runtime.

The two look-ups are those of `actors/context.py`; rooms below take their process as an argument.
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


# ---- `trimesh.dump`: what the process of the caller waits for --------------------------------------------------------


def dump(file: TextIO | None = None) -> None:
    """Write what this process waits for, and what its actors and child processes do.

    Blocks that are left; every child process, with the calls that run in it, those that are queued behind them, their
    tasks and what these await, its threads, and the stack of a main thread that is not free; every unended call and
    `Port.send` of this process, also calls that were given up and may still run.

    Args:
        file: Where to; standard error if None.

    Blocking: not a checkpoint; takes up to `TASKS_SECONDS` (0.5 s) when there are child processes, until each has
    answered; a process that is stopped, or holds the GIL in C, does not.
    """
    in_trio_now(_dump)(file if file is not None else sys.stderr)


def _dump(out: TextIO) -> None:
    from trimesh._runtime.watch.report import write_report  # noqa: PLC0415 - few programs dump

    write_report(find_proc(), out)


# ---- rebuilding ------------------------------------------------------------------------------------------------------

# What stands in a value for something of a package above: the process that decodes the value says what it is.
#
# Pickles name this function, so decoding one does not import that package.


def rebuild(name: str, *fields: Any) -> Any:
    """Return what the service `name` has in this process for some fields; see `Handler.rebuild`."""
    return current_proc().services.rebuild(name, fields)
