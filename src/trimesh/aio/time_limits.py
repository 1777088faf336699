"""Time limits of asyncio code that travel with its calls: `fail_after` and `move_on_after`.

A limit is a timer of the loop that cancels the task, and a deadline for each piece of the task's work in Trio. A Trio
scope around the whole body, like that of a mesh block, would need a Trio task for each limit, and a turn of Trio to
enter and to leave it.

LT-1 a limit cancels its task once, whichever comes first: its timer, or the deadline of work in Trio.
LT-2 leaving withdraws that cancel. Any other cancel of the task wins, and so does an error of the body.
LT-3 a limit applies to the task that entered it, as `asyncio.timeout` does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import trio

from trimesh._runtime.tasks import Site
from trimesh.aio.trio_run import TrioRun, running_loop

T = TypeVar("T")

_limits: Final[dict[asyncio.Task[Any], TimeLimit]] = {}
"""The open limit with the earliest deadline, by task."""


class TimeOver(BaseException):
    """Work in Trio was ended by the deadline of a limit; it does not reach users."""


class TimeLimit:
    """A block whose task is cancelled at a deadline, and which raises `TimeoutError` then; used once.

    Attributes:
        seconds: Time limit of the block.
        deadline: Its end, on the clock of `time.monotonic()`.
        cancelled_caught: True if it cancelled the body.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a time limit must be a number of seconds >= 0, got {seconds!r}")
        self.seconds = seconds
        self.deadline = math.inf
        self.cancelled_caught = False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._around: TimeLimit | None = None
        self._cancels_before = 0
        self._is_open = False
        self._has_cancelled = False

    async def __aenter__(self) -> Self:
        """Begin; no checkpoint.

        Raises:
            RuntimeError: The caller is no task of asyncio, or the limit was entered before.
        """
        if self._task is not None:
            raise RuntimeError("a time limit can be entered once, got a second `async with`: make another one")
        if trio.lowlevel.in_trio_task():
            raise RuntimeError(
                "a time limit of trimesh.aio must be entered in a task of asyncio, got one of Trio: write "
                "`with trio.fail_after(...)`"
            )
        loop = running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError(
                "a time limit must be entered in a task of asyncio, got code outside of one: enter it in a coroutine "
                "that a task runs"
            )
        self._task = task
        self._cancels_before = task.cancelling()
        self.deadline = time.monotonic() + self.seconds
        if self.seconds != math.inf:
            self._timer = loop.call_later(self.seconds, self.expire)
        self._around = around = _limits.get(task)
        if around is None or self.deadline < around.deadline:
            _limits[task] = self
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End; no checkpoint.

        Raises:
            TimeoutError: The body was cut by the limit.
        """
        if self._catches(error):
            raise TimeoutError(self._text) from error
        return None

    def _catches(self, error: BaseException | None) -> bool:
        """Close the limit; return whether the error of the body is the limit's cancel."""
        task = self._task
        assert task is not None
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._around is not None:
            _limits[task] = self._around
        else:
            _limits.pop(task, None)
        if self._has_cancelled and task.uncancel() <= self._cancels_before:
            self.cancelled_caught = isinstance(error, asyncio.CancelledError)
        return self.cancelled_caught

    def expire(self) -> bool:
        """Cancel the task if the limit has not done so yet; return whether it did now."""
        if self._has_cancelled or not self._is_open:
            return False
        assert self._task is not None
        self._has_cancelled = True
        self._task.cancel(self._text)
        return True

    async def cut(self) -> asyncio.CancelledError:
        """Return the cancel of the running task after the deadline has ended its work in Trio."""
        if self.expire():
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError as error:
                return error
        return asyncio.CancelledError(self._text)  # the timer was first, and its cancel has been delivered to the work

    @property
    def _text(self) -> str:
        return f"the time limit of {self.seconds:g} s is over"

    # ---- Trio's side -----------------------------------------------------------------------------------------

    def deadline_in_trio(self) -> float:
        """Return the deadline as Trio time."""
        return trio.current_time() + self.deadline - time.monotonic()

    async def within(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work in Trio until the deadline.

        Raises:
            TimeOver: The deadline has ended it.
        """
        with trio.CancelScope(deadline=self.deadline_in_trio()):
            return await work()
        raise TimeOver


class QuietTimeLimit(TimeLimit):
    """A block whose task is cancelled at a deadline, and after which the program continues; used once."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._catches(error)


class LimitedSite(Site[TrioRun]):
    """Site of a task with a time limit, which applies to its calls.

    Args:
        site: The site without it.
        limit: The limit.
    """

    def __init__(self, site: Site[TrioRun], limit: TimeLimit) -> None:
        super().__init__(site.run, site.parent)
        self._site = site
        self._limit = limit

    @property
    def keeper(self) -> trio.lowlevel.Task | None:
        return self._site.keeper

    @property
    def deadline(self) -> float:
        return min(self._site.deadline, self._limit.deadline_in_trio())


def current_limit() -> TimeLimit | None:
    """Return the limit with the earliest deadline that the running task of asyncio is in."""
    if not _limits:
        return None
    task = asyncio.current_task()
    return None if task is None else _limits.get(task)


def fail_after(seconds: float) -> TimeLimit:
    """Cancel the body after some seconds, and raise `TimeoutError`: `async with trimesh.aio.fail_after(5): ...`.

    Like `asyncio.timeout`, it cancels whatever the task awaits. In addition, the remaining time travels with each call:
    endpoints, and their own calls, have the deadline of the block. So have blocks, streams and calls that are opened or
    started in it, wherever they are awaited. Of nested limits the earliest applies.

    It applies to the task that entered it. A task that the body starts is cancelled with the body if the body awaits
    it, in `gather` or a task group, but its calls have no deadline: start calls in the body (`mesh.step.call.start()`),
    or enter a limit in that task. In an endpoint of `trimesh.aio.Actor` the caller's deadline applies, too. No mesh
    needs to be open. A mesh that an exit stack keeps open after the block is limited only while it starts.

    Args:
        seconds: Time limit of the block, at least 0; `math.inf` for none.

    Raises:
        ValueError: `seconds` is negative, or not a number.
        RuntimeError: On entering: the caller is no task of asyncio, or the limit was entered before.
        TimeoutError: On leaving: the limit cancelled the body. An error of the body is raised instead, and another
            cancel of the task wins. A body that caught the cancel raises nothing.

    Blocking: entering and leaving, never. A cancelled call waits until its endpoints have unwound, as after any cancel.

    Cost: a timer of the loop, and a cancel scope of Trio for each call.
    """
    return TimeLimit(seconds)


def move_on_after(seconds: float) -> QuietTimeLimit:
    """Like `fail_after`, but continue after the block: `async with trimesh.aio.move_on_after(5) as limit: ...`.

    `limit.cancelled_caught` is True if the limit cancelled the body.
    """
    return QuietTimeLimit(seconds)
