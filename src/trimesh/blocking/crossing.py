"""One piece of work that a thread has done in Trio: it waits for the end, or has a future for it."""

from __future__ import annotations

import concurrent.futures
import math
import queue
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import trio

from trimesh._runtime.tasks import Site, crossing
from trimesh.blocking.cancelled import Cancelled, TimeLimit, current_limit
from trimesh.blocking.interrupts import InterruptGuard
from trimesh.blocking.trio_thread import ThreadRun

T = TypeVar("T")


class Crossing(crossing.Crossing[T, ThreadRun]):
    """Work in Trio within the time limit of its caller.

    Attributes:
        limit: That limit.
    """

    def __init__(self, site: Site[ThreadRun]) -> None:
        super().__init__(site)
        self.limit: TimeLimit | None = current_limit()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may put into it

    def start(self, work: Callable[[], Awaitable[T]]) -> None:
        """Begin the work; see the base."""

        async def work_in_time() -> T:
            if self.limit is not None:
                self.scope.deadline = trio.current_time() + self.limit.deadline - time.monotonic()
            return await work()

        super().start(work_in_time)

    @property
    def was_cancelled_around(self) -> bool:
        """Whether the block around it was cancelled, rather than it."""
        return self.was_cancelled and not self.scope.cancelled_caught

    def wake(self) -> None:
        """Let the thread look at what has changed."""
        self._news.put(None)

    def wait(self, guard: InterruptGuard, until: Callable[[], bool], deadline: float = math.inf) -> None:
        """Wait until something is so, or a moment has come; Ctrl-C cancels the work meanwhile.

        Args:
            guard: Is on.
            until: Asked whenever something has changed.
            deadline: As `time.monotonic()` tells it.

        Raises:
            BaseException: What a signal handler of the program has raised; the work has ended then.
        """
        before, guard.on_interrupt = guard.on_interrupt, self._interrupt
        if guard.has_come:
            self._interrupt()  # it came after the start of the work
        raised: BaseException | None = None
        try:
            while not until() and time.monotonic() < deadline:
                try:
                    self._news.get(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    continue
                except BaseException as error:  # noqa: BLE001 - raised when the work has ended
                    raised = raised or error
                    self.cancel("a signal handler has raised")
            if raised is not None:
                raise raised
        finally:
            guard.on_interrupt = before
            del raised

    def _interrupt(self) -> None:
        self.cancel("Ctrl-C")

    def result(self) -> T:
        """Return what has come of the work, which has ended.

        Raises:
            Cancelled: A cancel has ended it.
            BaseException: What it has raised.
        """
        try:
            if self.error is not None:
                raise self.error
            if self.was_cancelled:
                raise self.cancelled()
            return cast("T", self.value)
        finally:
            del self  # no cycle of an error, its traceback and this frame

    def cancelled(self) -> Cancelled:
        """Return what a cancel of the work is to the thread."""
        limit = self.limit
        # The block around it may have the same deadline, and be first to hear of it.
        if limit is not None and (self.scope.cancelled_caught or time.monotonic() >= limit.deadline):
            return Cancelled("the time limit around it is over", limit)
        return Cancelled("the block around it was cancelled")


class FutureCrossing(Crossing[T]):
    """Work in Trio that a future stands for.

    Attributes:
        future: Has its result, in the thread of Trio first.
    """

    def __init__(self, site: Site[ThreadRun]) -> None:
        super().__init__(site)
        self.future = CallFuture[T](self)

    def wake(self) -> None:
        """Give the future what has come."""
        self.future.settle()


class CallFuture(concurrent.futures.Future[T]):
    """The result of a call that is under way; see `concurrent.futures.Future`.

    `cancel` cancels the call, remote side too; the future is done when that has unwound: cancelled, or with the error
    that the endpoint has raised meanwhile. Callbacks run in the thread of Trio: they must not wait for calls.
    """

    def __init__(self, crossing: FutureCrossing[T]) -> None:
        super().__init__()
        self._crossing = crossing

    def running(self) -> bool:
        """Return whether the call is under way."""
        return not self.done()

    def cancel(self) -> bool:
        """Ask the call to end; return whether it had not ended yet. `result()` waits until it has."""
        if self.done():
            return False
        self._crossing.cancel("the future was cancelled")
        return True

    def settle(self) -> None:
        """Take the result of the work, which has ended."""
        work = self._crossing
        if work.error is not None:
            self.set_exception(work.error)
        elif work.was_cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_result(cast("T", work.value))
