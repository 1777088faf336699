"""What ends a wait of a thread from elsewhere: `Cancelled`, and the time limits that make one."""

from __future__ import annotations

import math
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Self


class Cancelled(BaseException):
    """A wait was cancelled from Trio's side: its time is over, or the block around it has failed.

    Like `trio.Cancelled` it is no error: let it pass. The block, or the time limit, that it belongs to takes it,
    and raises what has happened.

    Attributes:
        limit: The time limit, if it was one.
    """

    def __init__(self, text: str, limit: TimeLimit | None = None) -> None:
        super().__init__(text)
        self.limit = limit


_limit: ContextVar[TimeLimit | None] = ContextVar("trimesh_blocking_limit", default=None)


def current_limit() -> TimeLimit | None:
    """Return the limit with the earliest deadline that the running code is in."""
    return _limit.get()


class TimeLimit:
    """A block in which waits end at a deadline, and which raises `TimeoutError` then; used once.

    Attributes:
        deadline: When, as `time.monotonic()` tells it.
        cancelled_caught: Whether a wait was ended by it.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a time limit must be seconds, at least 0, got {seconds!r}")
        self.seconds = seconds
        self.deadline = math.inf
        self.cancelled_caught = False
        self._around: TimeLimit | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self.deadline = time.monotonic() + self.seconds
        self._around = _limit.get()
        if self._around is None or self.deadline < self._around.deadline:
            _limit.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End.

        Raises:
            TimeoutError: A wait was ended.
        """
        if self._catches(error):
            raise TimeoutError(f"the time limit of {self.seconds:g} s is over") from None
        return None

    def _catches(self, error: BaseException | None) -> bool:
        _limit.set(self._around)
        self.cancelled_caught = isinstance(error, Cancelled) and error.limit is self
        return self.cancelled_caught


class QuietTimeLimit(TimeLimit):
    """A block in which waits end at a deadline, after which the program goes on behind it; used once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End."""
        return self._catches(error)


def fail_after(seconds: float) -> TimeLimit:
    """Let waits of a block end after some seconds with `TimeoutError`: `with trimesh.blocking.fail_after(5): ...`.

    Calls are cancelled, remote side too, and have unwound when it is raised. The time that is left travels with each
    call. Code that waits for nothing of trimesh is not interrupted.
    """
    return TimeLimit(seconds)


def move_on_after(seconds: float) -> QuietTimeLimit:
    """As `fail_after`, but go on after the block; `limit.cancelled_caught` tells whether the time was over."""
    return QuietTimeLimit(seconds)
