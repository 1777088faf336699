"""One piece of work that code outside of Trio has done there, and waits for.

CX-1 who waits goes on only after the work in Trio has ended, however often it is asked to stop meanwhile.
CX-2 a cancel of who waits cancels the scope of the work; an error that the work raises all the same wins over the
     cancel; a value does not.
CX-3 a cancel that comes from Trio's side is what the outside has for one.

`trimesh.aio` lets a task of asyncio wait, `trimesh.blocking` a thread.
"""

from __future__ import annotations

import contextvars
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import trio
from trio.lowlevel import reschedule

from trimesh._runtime.tasks.cancelled import split_cancelled

T = TypeVar("T")


class Waiting(Protocol):
    """What waits for work in Trio."""

    def fail(self, error: BaseException) -> None:
        """End the wait: the Trio run is over."""


class OutsideRun(Protocol):
    """A Trio run, as code outside of it sees it.

    Attributes:
        waiting: What waits for work in it.
    """

    @property
    def waiting(self) -> set[Waiting]: ...

    def post(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread of Trio.

        Raises:
            trio.RunFinishedError: The run is over.
        """

    def tell(self, function: Callable[[], object]) -> bool:
        """Call `function` where the outside wants to hear; return whether that is still there. For Trio's side."""
        ...


RunT = TypeVar("RunT", bound=OutsideRun)


class Site(Generic[RunT]):
    """Where in Trio the work of a part of an outside program is done: inside the innermost block that it is in.

    Attributes:
        parent: The site around it.
        is_open: Whether it takes work; told by the outside.
    """

    def __init__(self, run: RunT, parent: Site[RunT] | None) -> None:
        self.run = run
        self.parent = parent
        self.is_open = False
        self._nursery: trio.Nursery | None = None
        self._deadline = math.inf

    @property
    def nursery(self) -> trio.Nursery | None:
        """Nursery of the work; a cancel of the block cancels it. None before there is one."""
        return self._nursery

    @property
    def deadline(self) -> float:
        """Deadline of the scopes around the nursery when it was opened (Trio time)."""
        return self._deadline

    @property
    def keeper(self) -> trio.lowlevel.Task | None:
        """The task of Trio that waits for the code here; None before there is one."""
        return None if self.nursery is None else self.nursery.parent_task

    def work_in(self, nursery: trio.Nursery) -> None:
        """Have the work done in a nursery, which the running task has opened."""
        self._nursery = nursery
        self._deadline = trio.current_effective_deadline()


class Crossing(ABC, Generic[T, RunT]):
    """Work in Trio for code outside of it.

    Args:
        on_broken: Called when Trio has ended without a word about it.

    Attributes:
        scope: Around it, there.
        is_done: Whether it has ended; told by the outside, as all that follows.
        error: What it has raised, without the cancel.
    """

    def __init__(self, site: Site[RunT], on_broken: Callable[[], object] | None = None) -> None:
        self.site = site
        self.scope = trio.CancelScope()
        self.is_done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self.was_cancelled = False
        self._on_broken = on_broken

    def start(self, work: Callable[[], Awaitable[T]]) -> None:
        """Begin the work, with the context variables of the caller.

        Raises:
            trio.RunFinishedError: Trio has ended.
        """
        context = contextvars.copy_context()
        self.site.run.waiting.add(self)
        try:
            self.site.run.post(lambda: context.run(self._begin, work))
        except trio.RunFinishedError:
            self.site.run.waiting.discard(self)
            raise

    def _begin(self, work: Callable[[], Awaitable[T]]) -> None:
        nursery = self.site.nursery
        assert nursery is not None
        try:
            nursery.start_soon(self._work, work)
        except RuntimeError as error:  # the run of another thread has ended meanwhile
            self.site.run.tell(partial(self._end, error=error))

    @trio.lowlevel.enable_ki_protection
    async def _work(self, work: Callable[[], Awaitable[T]]) -> None:
        value: T | None = None
        error: BaseException | None = None
        is_cancelled = False
        try:
            with self.scope:
                value = await work()
            is_cancelled = self.scope.cancelled_caught
        except BaseException as raised:  # noqa: BLE001 - it is the outside's to raise
            cancelled, error = split_cancelled(raised)
            if cancelled is not None:
                is_cancelled = True
                raise cancelled from None
        finally:
            self.site.run.tell(partial(self._end, value, error, is_cancelled=is_cancelled))
            del error

    def _end(self, value: T | None = None, error: BaseException | None = None, *, is_cancelled: bool = False) -> None:
        self.value, self.error, self.was_cancelled = value, error, is_cancelled
        self.is_done = True
        self.site.run.waiting.discard(self)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the wait with an error: Trio has ended without a word about the work."""
        self._end(error=error)
        if self._on_broken is not None:
            self._on_broken()

    def cancel(self, reason: str) -> None:
        """Cancel the work, from the outside."""
        if not self.is_done:
            with suppress(trio.RunFinishedError):  # then `fail` is called
                self.site.run.post(partial(self.scope.cancel, reason=reason))

    @abstractmethod
    def wake(self) -> None:
        """Let who waits look at what has changed."""

    def __repr__(self) -> str:
        return f"<work in Trio, {'done' if self.is_done else 'under way'}>"


woken_elsewhere: Final[dict[trio.lowlevel.Task, Callable[[], object]]] = {}
"""Wake-up functions of stand-ins, whose coroutines another loop steps; see `trimesh.aio.stand_in`."""


def wake(task: trio.lowlevel.Task) -> None:
    """Reschedule a waiting task without a result, in Trio or in the loop that steps it."""
    found = woken_elsewhere.get(task)
    if found is None:
        reschedule(task)
    else:
        found()
