"""What the Trio run of this thread waits on: its epoll set, which has no public name.

Where a release of Trio keeps it elsewhere, or treats it otherwise, there is none, and everything works without.
"""

from __future__ import annotations

import select
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import trio


class Poller(NamedTuple):
    """The epoll set of a run.

    Attributes:
        epoll: The set.
        is_guest: Whether the run is a guest of another loop, which has other work than Trio's.
    """

    epoll: select.epoll
    is_guest: bool

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
    runner: Any = getattr(trio._core._run.GLOBAL_RUN_CONTEXT, "runner", None)  # noqa: SLF001 - as said above
    io_manager: Any = getattr(runner, "io_manager", None)
    epoll: Any = getattr(io_manager, "_epoll", None)
    # An event of a descriptor that no task waits for is forgotten: those who wait are looked up in a `defaultdict`.
    if not isinstance(epoll, select.epoll) or not isinstance(getattr(io_manager, "_registered", None), defaultdict):
        return None
    return Poller(epoll, getattr(runner, "is_guest", True))
