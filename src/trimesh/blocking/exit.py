"""The end of the interpreter: blocks that are still open then are closed in order."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from typing import Any, Final, Protocol

from trimesh import limits

_log = logging.getLogger("trimesh")


class OpenBlock(Protocol):
    """A block that may be open at the exit.

    Attributes:
        what: For people.
        around: The block around it.
    """

    what: str
    around: Any

    def close_until(self, deadline: float) -> bool:
        """Leave it; return whether it was left by a moment, as `time.monotonic()` tells it."""
        ...


class BlocksOfRun(Protocol):
    """The blocks of one Trio run.

    Attributes:
        bodies: In the order in which they were entered.
        is_forgotten: Whether this process was forked from the one that has it.
    """

    bodies: list[OpenBlock]
    is_forgotten: bool


_runs: Final[weakref.WeakSet[BlocksOfRun]] = weakref.WeakSet()


def close_at_exit(run: BlocksOfRun) -> None:
    """Have the blocks of a run closed at the exit of the interpreter."""
    if not _runs:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # anew, so that it comes before what was imported since
    _runs.add(run)


def _close_all() -> None:
    deadline = time.monotonic() + limits.EXIT_SECONDS
    for run in _runs:
        if run.is_forgotten:
            continue
        for body in reversed(list(run.bodies)):
            _log.warning(
                "%s was still open at the exit of the interpreter and is closed, in at most %g s "
                "(limits.EXIT_SECONDS): write `with`, or call close()",
                body.what,
                limits.EXIT_SECONDS,
            )
            try:
                is_over = body.close_until(deadline)
            except BaseException:  # noqa: BLE001 - the interpreter ends, whatever it is
                _log.exception("closing %s has failed", body.what)
            else:
                if not is_over:
                    _log.warning("%s did not end in time: its processes are killed by the end of this one", body.what)
