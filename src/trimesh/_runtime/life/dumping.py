"""`trimesh.dump`: what the process of the caller waits for."""

from __future__ import annotations

import sys
from typing import TextIO

from trimesh._runtime.life.current import find_proc
from trimesh._runtime.tasks.foreign import in_trio_now
from trimesh._runtime.watch.report import write_report


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
    write_report(find_proc(), out)
