r"""Started calls: sent by one task, awaited later, and owned by a block, an actor or a nursery meanwhile.

    running --> returned | failed | cancelled
                              \--unclaimed--> claimed (awaited), or raised in the owner

SD-1 each is a task of its owner: a block, an actor, or a nursery. The owner does not end before it.
SD-2 an error is raised where the call is awaited. An error that can no longer be awaited, because the handle is gone
     or the owner ends, fails the owner: it is never lost, and reported to the owner once.
SD-3 a call that the owner's end, `cancel` or the deadline interrupted does not count as an error.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import trio

from trimesh._runtime.tasks.background import BUDGET_REASON, split_cancelled


class StartedWork:
    """A started call.

    Args:
        what: Name of the endpoint, for messages.
        deadline: When it is cancelled (Trio time): the deadline of the task that started it.

    Attributes:
        scope: Cancel scope around it.
        ended: Set when it has ended.
        cut_reason: Why it was interrupted; None if it was not.
        awaiters: Tasks without a deadline that await it.
        finish: Waits for the outcome; None for a call that was never sent.
    """

    def __init__(self, what: str, deadline: float = math.inf) -> None:
        self.what = what
        self.scope = trio.CancelScope(deadline=deadline)
        self.ended = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self.cut_reason: str | None = None
        self.awaiters: list[trio.lowlevel.Task] = []
        self.finish: Callable[[], Awaitable[Any]] | None = None
        self._asked: str | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._owner: StartedCalls | None = None

    def cancel(self, reason: str) -> None:
        """Cancel the call; no effect if it has ended."""
        if not self.ended.is_set():
            self._asked = self._asked or reason
            self.scope.cancel(reason=reason)

    def belongs_to(self, owner: StartedCalls) -> None:
        """Set the owner that gets an error that no task has awaited."""
        self._owner = owner

    def claim(self) -> None:
        """Note that its error is raised where it is awaited."""
        if self._owner is not None:
            self._owner.claimed(self)

    def drop(self) -> None:
        """Note that no task can await the call any more. For any thread, also inside a finalizer."""
        owner = self._owner
        if owner is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(owner.dropped, self)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> BaseException | None:
        """Run the call in its task; return the `Cancelled` if a cancel of the owner ended it."""
        finish, self.finish = self.finish, None
        try:
            if finish is None:
                return None
            with self.scope:
                self.value = await finish()
                return None
            self.cut_reason = self._asked or BUDGET_REASON
        except BaseException as raised:
            cancelled, error = split_cancelled(raised)
            if isinstance(error, Exception):
                self.error = error
            elif error is not None:
                raise
            else:
                self.cut_reason = f"the owner of {self.what} has ended"
            return cancelled
        finally:
            self.ended.set()
            del finish
        return None


class Owner(Protocol):
    """Owner of started calls: a block, an actor or a nursery."""

    def check_open(self) -> None:
        """Refuse calls once the owner is ending.

        Raises:
            RuntimeError: The owner is ending.
        """

    def start(self, work: StartedWork) -> None:
        """Start the task of a call."""


class StartedCalls:
    """Started calls that a block or an actor owns.

    Args:
        name: Name of the owner, for messages.
        fail: Called, while the owner is open, with an error that no task can await any more.
    """

    def __init__(self, name: str, fail: Callable[[Exception], None]) -> None:
        self._name = name
        self._fail = fail
        self._nursery: trio.Nursery | None = None
        self._running: dict[StartedWork, None] = {}
        self._unclaimed: dict[StartedWork, Exception] = {}
        self._dropped: set[StartedWork] = set()
        self._all_ended = trio.Event()

    def open(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def close(self, reason: str) -> None:
        """Refuse further calls and cancel the running ones."""
        self._nursery = None
        for work in list(self._running):
            work.cancel(reason)

    def check_open(self) -> None:
        if self._nursery is None:
            raise RuntimeError(
                f"a call must be started while its owner is open, got {self._name}, which is ending or has ended: "
                "start it earlier, or by .start_in(nursery, ...)"
            )

    def start(self, work: StartedWork) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._run, work, name=f"started call of {work.what}")
        self._running[work] = None
        work.belongs_to(self)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, work: StartedWork) -> None:
        try:
            # A block raises the reason of its cancel; its nursery must not raise the cancel first.
            await work.run()
        finally:
            self._ended(work)

    def _ended(self, work: StartedWork) -> None:
        self._running.pop(work, None)
        if not self._running:
            self._all_ended.set()
        if work.error is None:
            self._dropped.discard(work)
        elif work in self._dropped and self._nursery is not None:
            self._dropped.discard(work)
            self._fail(work.error)
        else:
            self._unclaimed[work] = work.error

    def claimed(self, work: StartedWork) -> None:
        """Note that the error of a call is raised where it is awaited."""
        self._unclaimed.pop(work, None)

    def dropped(self, work: StartedWork) -> None:
        """Note that no task can await a call any more."""
        if work in self._running:
            self._dropped.add(work)
        elif self._nursery is not None:
            error = self._unclaimed.pop(work, None)
            if error is not None:
                self._fail(error)

    async def wait_ended(self) -> None:
        """Wait until no call runs; no checkpoint if none does."""
        while self._running:
            self._all_ended = trio.Event()
            await self._all_ended.wait()

    def take_errors(self) -> list[Exception]:
        """Remove and return the errors that no task has awaited, in order of arrival."""
        errors = [*self._unclaimed.values()]
        self._unclaimed.clear()
        return errors


class NurseryOwner:
    """A user's nursery as the owner of a call, which is an ordinary task of it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def check_open(self) -> None:
        """See `Owner.check_open`: the nursery itself refuses tasks once it is closed."""

    def start(self, work: StartedWork) -> None:
        self._nursery.start_soon(self._run, work, name=f"started call of {work.what}")

    @trio.lowlevel.enable_ki_protection
    async def _run(self, work: StartedWork) -> None:
        cancelled = await work.run()
        if work.error is not None:
            raise work.error
        if cancelled is not None:
            raise cancelled
