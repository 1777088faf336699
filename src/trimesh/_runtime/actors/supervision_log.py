"""The log of what a policy keeps from being raised: deaths, failures and restarts, a line each, so many a second."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.values.codec import describe
from trimesh.errors import leaves, origin, text_of

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_log = logging.getLogger("trimesh")


class SupervisionLog:
    """Writes to the logger `trimesh` at WARNING, at most `limits.SUPERVISION_LOG_LINES` lines a second."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._lines = 0

    def say(self, mesh: str, error: BaseException, what_next: str) -> None:
        """Write a line: the mesh, where the failure was, which it is, and what the policy does about it."""
        first = next(leaves(error))
        where = origin(first)
        place = "" if where is None else f" ({describe(where)})"
        text = " ".join(f"{type(first).__name__}: {text_of(first)}".splitlines())[: limits.REASON_CHARS_MAX]
        self.write(f"{mesh}: {text}{place}; {what_next}")

    def write(self, text: str) -> None:
        """Write a record, or leave it out when there were too many."""
        now = trio.current_time()
        if now >= self._since + 1.0:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines == limits.SUPERVISION_LOG_LINES:
            _log.warning("more of such news in this second are left out: events() has them all")
        elif self._lines < limits.SUPERVISION_LOG_LINES:
            _log.warning("%s", text)


def log_kept_back(proc: Proc, mesh: str, error: BaseException, what_next: str) -> None:
    """Log a failure of a member of `mesh` that is not raised."""
    _log_of(proc).say(mesh, error, what_next)


def log_line(proc: Proc, text: str) -> None:
    """Log other news that nothing raises, under the same bound."""
    _log_of(proc).write(text)


def _log_of(proc: Proc) -> SupervisionLog:
    found = proc.above.get(SupervisionLog)
    if not isinstance(found, SupervisionLog):
        found = proc.above[SupervisionLog] = SupervisionLog()
    return found
