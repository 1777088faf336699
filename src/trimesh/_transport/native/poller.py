"""What the Trio run of this thread waits on: its epoll set, which has no public name.

Where a release of Trio keeps it elsewhere, or treats it otherwise, there is none, and everything works without. A run
that another loop drives waits in that loop; see `LoopDriver`.
"""

from __future__ import annotations

import math
import select
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

if TYPE_CHECKING:
    from trimesh.aio.driver import LoopDriver


loop_wait: Final[trio.lowlevel.RunVar[LoopDriver | None]] = trio.lowlevel.RunVar("trimesh_loop_wait", None)
"""The wait of the loop that drives this run; None for a run that waits itself."""


class Poller(NamedTuple):
    """The epoll set of a run, and what else the run has to do.

    Attributes:
        is_guest: Whether the run is a guest of another loop, which has other work than Trio's.
        runner: The run, where it can be asked what it will do next; else None.
    """

    epoll: select.epoll
    is_guest: bool
    runner: Any = None

    def is_quiet(self, seconds: float, tasks: int = 0) -> bool:
        """Return whether just so many tasks can run, and no deadline is due in the next seconds.

        Tasks of the running turn that have not had theirs are not counted: the run does not say who they are.
        """
        runner = self.runner
        if runner is None or len(runner.runq) != tasks or runner.waiting_for_idle:
            return False
        deadline: float = runner.deadlines.next_deadline()
        return deadline == math.inf or deadline - runner.clock.current_time() > seconds

    @contextmanager
    def waking_for(self, descriptor: int) -> Generator[None]:
        """Let the run wake each time that something comes to `descriptor`, without a task that waits for it."""
        self.epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        try:
            yield
        finally:
            self.epoll.unregister(descriptor)


def poller_of_run() -> Poller | None:
    """Return what the running Trio run waits on, or None where it cannot be used."""
    runner: Any = trio
    for name in ("_core", "_run", "GLOBAL_RUN_CONTEXT", "runner"):
        runner = getattr(runner, name, None)
    io_manager: Any = getattr(runner, "io_manager", None)
    epoll: Any = getattr(io_manager, "_epoll", None)
    # An event of a descriptor that no task waits for is forgotten: those who wait are looked up in a `defaultdict`.
    if not isinstance(epoll, select.epoll) or not isinstance(getattr(io_manager, "_registered", None), defaultdict):
        return None
    return Poller(epoll, getattr(runner, "is_guest", True), runner if _says_what_is_next(runner) else None)


def _says_what_is_next(runner: Any) -> bool:
    """Return whether a run has all that `Poller.is_quiet` reads. Clocks of tests go by other times than waits take."""
    has_all = all(hasattr(runner, name) for name in ("runq", "waiting_for_idle", "clock"))
    can_tell = hasattr(getattr(runner, "deadlines", None), "next_deadline")
    return has_all and can_tell and type(runner.clock).__name__ == "SystemClock"
