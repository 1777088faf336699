r"""Work that code outside of Trio runs in Trio, and blocks of Trio whose body runs outside.

CX-1 the waiter continues only after the work in Trio has ended, however often it is cancelled meanwhile.
CX-2 a cancel of the waiter cancels the scope of the work; an error that the work raises all the same wins over the
     cancel; a value does not.
CX-3 a cancel from Trio's side becomes the cancel of the outside.

With `trimesh.aio` the waiter is a task of asyncio, with `trimesh.blocking` a thread.

A block of Trio whose body is elsewhere: it is entered, held while the body runs, and left, all in one Trio task.

    entering --> held --body ends-------------------> leaving --> left
                   \--cancelled in Trio--> body ends -----^

BD-1 the block is entered and left in one Trio task, and calls of its body run in a nursery inside of it.
BD-2 an exception of the body goes through the block, whose error is raised instead.

Subclasses define how a cancel in Trio reaches the body: `trimesh.aio.body`, for one.
"""

from __future__ import annotations

import contextvars
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, cast

import trio
from trio.lowlevel import enable_ki_protection, in_trio_run, in_trio_task, reschedule

from trimesh._runtime.system.forks import end_child, is_forked_run
from trimesh._runtime.tasks.background import effective_deadline, split_cancelled
from trimesh._wire.exceptions.tracebacks import has_user_frame, without_own_frames
from trimesh.errors import MeshErrorGroup, context_of, leaves, set_context

T = TypeVar("T")


class Waiting(Protocol):
    """Waiter for work in Trio."""

    def fail(self, error: BaseException) -> None:
        """End the wait: the Trio run is over."""


class OutsideRun(Protocol):
    """A Trio run, seen from code outside of it.

    Attributes:
        waiting: Waiters for work in it.
    """

    @property
    def waiting(self) -> set[Waiting]: ...

    def post(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread of Trio.

        Raises:
            trio.RunFinishedError: The run is over.
        """

    def tell(self, function: Callable[[], object]) -> bool:
        """Call `function` in the outside's own thread or loop; return whether that still exists. For Trio's side."""
        ...


RunT = TypeVar("RunT", bound=OutsideRun)


class Site(Generic[RunT]):
    """Place in Trio for the work of a part of an outside program: inside the innermost block around that part.

    Attributes:
        parent: The site around it.
        is_open: Whether it accepts work; set by the outside.
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
        """Trio task that waits for the code here; None before there is one."""
        return None if self.nursery is None else self.nursery.parent_task

    def work_in(self, nursery: trio.Nursery) -> None:
        """Run the work in a nursery, which the running task has opened."""
        self._nursery = nursery
        self._deadline = effective_deadline()


class Crossing(ABC, Generic[T, RunT]):
    """Work in Trio for code outside of it.

    Args:
        on_broken: Called when Trio has ended without reporting the work's end.

    Attributes:
        scope: Cancel scope around the work in Trio.
        is_done: Whether it has ended; set by the outside, like the attributes below.
        error: Exception of the work, without the cancel.
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
        """End the wait with an error: Trio has ended without reporting the work's end."""
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
        """Make the waiter check for changes."""

    def __repr__(self) -> str:
        return f"<work in Trio, {'done' if self.is_done else 'under way'}>"


woken_elsewhere: Final[dict[trio.lowlevel.Task, Callable[[], object]]] = {}
"""Wake-up functions of stand-ins, whose coroutines another loop steps; see `trimesh.aio.sites`."""


def wake(task: trio.lowlevel.Task) -> None:
    """Reschedule a waiting task without a result, in Trio or in the loop that steps it."""
    found = woken_elsewhere.get(task)
    if found is None:
        reschedule(task)
    else:
        found()


# ---- portal: work of foreign code ------------------------------------------------------------------------------------

# Callers of public functions: a Trio task, or the task of another loop, which needs a portal into Trio.
#
# Every public coroutine function passes its work through `in_trio`; every public async context manager is a `TrioBlock`
# or passes through `in_trio_block`; every public sync function that reads the runtime passes through `in_trio_now`.
# In a Trio task they cost one check and return their argument. Elsewhere they return an equivalent that the portal of
# `trimesh.aio` runs in Trio.

P = ParamSpec("P")


class Portal(Protocol):
    """Runs work of code outside of Trio in Trio, and returns its results."""

    def run(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Run a coroutine function in Trio; a cancel of the caller cancels it there and waits for its end."""
        ...

    def take(self, step: Callable[[], Awaitable[T]], put_back: Callable[[T], None]) -> Awaitable[T]:
        """Run a step that takes something out; a result for a caller that is cancelled is put back."""
        ...

    def block(
        self, enter: Callable[[], Awaitable[T]], leave: Callable[[BaseException | None], Awaitable[bool | None]]
    ) -> AbstractAsyncContextManager[T]:
        """Return a block whose body is here, and which is entered and left in one task of Trio.

        Args:
            enter: Returns the value for the body.
            leave: Receives the exception of the body; returns whether that is handled.
        """
        ...

    def run_now(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that does not wait in the thread of Trio."""
        ...

    def place(self) -> Site[Any] | None:
        """Return the place in Trio for work of the running code; None if there is none."""
        ...


_portal: Portal | None = None


def set_portal(portal: Portal) -> None:
    """Make `portal` the one for code outside of Trio."""
    global _portal  # noqa: PLW0603 - one for all loops of the process: it keeps them apart itself
    _portal = portal


def in_trio(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return `function` if the caller is a Trio task; elsewhere a function that runs it in Trio.

    Raises:
        RuntimeError: The caller is not a Trio task, and `trimesh.aio` is not in use.
    """
    return function if in_trio_task() else partial(_the_portal().run, function)


def in_trio_taking(step: Callable[[], Awaitable[T]], put_back: Callable[[T], None]) -> Awaitable[T]:
    """Return the next result of `step`, which takes something out, such as an item of a stream.

    Outside of Trio a cancel may come between the end of the step in Trio and its caller; `put_back` receives the result
    that would be lost then.
    """
    return step() if in_trio_task() else _the_portal().take(step, put_back)


def in_trio_block(block: AbstractAsyncContextManager[T]) -> AbstractAsyncContextManager[T]:
    """Return a block that enters and leaves `block` in Trio, wherever its body is.

    Entering raises `RuntimeError` if the caller is not a Trio task, and `trimesh.aio` is not in use.
    """
    return _Wrapped(block)


def in_trio_now(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` if the caller is in Trio; elsewhere a function that runs it there, if there is a portal."""
    return function if _portal is None or in_trio_task() else partial(_portal.run_now, function)


def place_outside() -> Site[Any] | None:
    """Return the place in Trio for work of the running code; None for a task of Trio itself."""
    return None if _portal is None or in_trio_task() else _portal.place()


class TrioBlock(ABC, Generic[T]):
    """An async context manager that is entered and left in Trio, wherever its body is."""

    _crossing: AbstractAsyncContextManager[T] | None = None

    @enable_ki_protection
    async def __aenter__(self) -> T:
        """Enter it."""
        self._begin()
        try:
            if in_trio_task():
                return await self._enter()
            self._crossing = _the_portal().block(self._enter, self._leave)
            return await self._crossing.__aenter__()
        except BaseException as error:
            without_own_frames(error)
            raise

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave it."""
        if is_forked_run():
            end_child(error)
        try:
            if self._crossing is None:
                is_settled = await self._leave(error)
            else:
                is_settled = await self._crossing.__aexit__(kind, error, traceback)
            if is_settled or error is None:
                return is_settled
            found, context = error, None
        except BaseException as raised:
            found = without_own_nurseries(raised, error)
            context = context_of(found)
            if found is raised and found is not error:
                without_own_frames(found)
                raise
        if error is not None and _is_same(found, error):  # the error leaves as it has arrived
            if traceback is not None:
                BaseException.with_traceback(error, traceback)
            without_own_frames(error)
            return False
        try:
            raise without_own_frames(found)
        finally:
            set_context(found, context)  # which the error of the body has replaced
            del found, error, context

    def _begin(self) -> None:
        """Note the use before entering; a cancel may come between."""

    @abstractmethod
    async def _enter(self) -> T: ...

    @abstractmethod
    async def _leave(self, error: BaseException | None) -> bool | None:
        """Leave it, in the same Trio task; `error` is the exception of the body."""


class _Wrapped(TrioBlock[T], Generic[T]):
    """Any context manager as a block."""

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block

    async def _enter(self) -> T:
        return await self._block.__aenter__()

    async def _leave(self, error: BaseException | None) -> bool | None:
        if error is None:
            return await self._block.__aexit__(None, None, None)
        try:
            return await self._block.__aexit__(type(error), error, error.__traceback__)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1 and group.exceptions[0] is error:
                return False  # of a block of ours inside, which the user has not opened
            raise


def without_own_nurseries(raised: BaseException, error: BaseException | None) -> BaseException:
    """Return the exception of leaving a block, without the groups of nurseries that the user has not opened.

    Args:
        raised: Exception of leaving.
        error: Exception of the body, which is kept unchanged.

    Returns:
        `raised`, or `error` if nothing else has failed, or one group of exceptions of our own tasks.
    """
    members = _members(raised, error)
    if len(members) == 1 and (members[0] is raised or members[0] is error):
        return members[0]
    exceptions = [member for member in members if isinstance(member, Exception)]
    if len(exceptions) == len(members):
        return MeshErrorGroup(_FAILED, exceptions)
    return BaseExceptionGroup(_FAILED, members)


def _is_same(found: BaseException, error: BaseException) -> bool:
    """Return whether an exception is the error of the body, or a copy of its group, as made by a cancel scope."""
    if found is error:
        return True
    is_copy = all(isinstance(one, BaseExceptionGroup) for one in (found, error))
    return is_copy and [id(leaf) for leaf in leaves(found)] == [id(leaf) for leaf in leaves(error)]


def _members(raised: BaseException, error: BaseException | None) -> list[BaseException]:
    if raised is error or not isinstance(raised, BaseExceptionGroup):
        return [raised]
    group = cast("BaseExceptionGroup[BaseException]", raised)
    if group.message != _NURSERY or has_user_frame(group):
        return [group]
    return [member for one in group.exceptions for member in _members(one, error)]


_FAILED: Final = "a task of a block failed"
_NURSERY: Final = "Exceptions from Trio nursery"
"""Message of the groups that nurseries of Trio make."""


def _the_portal() -> Portal:
    if _portal is not None:
        return _portal
    if in_trio_run():
        raise RuntimeError("meshes must be used in Trio tasks, got a callback of a Trio run: start a task from it")
    raise RuntimeError(
        "meshes must be used in Trio tasks, got code outside of trio.run(): in asyncio, write `async with "
        "trimesh.aio.spawn_procs(...) as procs:` (a job works after `import trimesh.aio`); in a plain thread, use "
        "trimesh.blocking"
    )


# ---- held block ------------------------------------------------------------------------------------------------------

# A block of Trio whose body is elsewhere: it is entered, held while the body runs, and left, all in one Trio task.

SiteT = TypeVar("SiteT", bound=Site[Any])


class HeldBlock(ABC, Generic[T, SiteT]):
    """Trio's side of a block whose body is elsewhere.

    Args:
        leave: Leaves it, in the same task; receives the exception of the body, returns whether that is handled.
    """

    _site: SiteT

    def __init__(
        self, enter: Callable[[], Awaitable[T]], leave: Callable[[BaseException | None], Awaitable[bool | None]]
    ) -> None:
        self._enter_block = enter
        self._leave_block = leave
        self._body_error: BaseException | None = None
        self._left = trio.Event()
        self._is_suppressed = False

    @abstractmethod
    def _entered(self, value: T) -> None:
        """Let the body begin; called by `tell`."""

    @abstractmethod
    def _tell_cancel(self) -> bool:
        """Report the cancel of the block to the body; return whether to wait for the body's end. In Trio."""

    def _let_go(self) -> None:
        """Let the block be left, from the outside."""
        with suppress(trio.RunFinishedError):
            self._site.run.post(self._left.set)

    @trio.lowlevel.enable_ki_protection
    async def _live(self) -> None:
        """Enter the block, hold it while the body runs, leave it."""
        value = await self._enter_block()
        error: BaseException | None = None
        try:
            await self._hold(value)
        except BaseException as raised:  # noqa: BLE001 - it goes through the block
            error = raised
        error = self._body_error or error
        try:
            if await self._leave_block(error):
                self._is_suppressed = True
            elif (cancelled := split_cancelled(error)[0]) is not None:
                raise cancelled
        finally:
            del error

    @trio.lowlevel.enable_ki_protection
    async def _hold(self, value: T) -> None:
        """Wait until the body has been left, and the work that it has started in Trio has ended.

        Raises:
            trio.Cancelled: The block was cancelled, and the body has been left after that.
        """
        cancelled: trio.Cancelled | None = None
        async with trio.open_nursery() as nursery:
            self._site.work_in(nursery)
            self._site.run.tell(partial(self._entered, value))
            try:
                await self._left.wait()
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled as error:
                cancelled = error
                if self._tell_cancel():
                    with trio.CancelScope(shield=True):
                        await self._left.wait()
            if self._body_error is not None or cancelled is not None:
                nursery.cancel_scope.cancel(reason="the body of the block was left")
        if cancelled is not None:
            raise cancelled
