"""Work in Trio for a thread that waits: choice of the run and the block; blocks with their body in the thread.

A body is a `HeldBlock` (BD-1, BD-2). When Trio cancels the block, waits in its body raise `Cancelled`; the block is
left, and raises its failures, when the body ends. A block of `open()` has no body: it is left at once, and running
calls raise its failures, else the next call, else `close`.
"""

from __future__ import annotations

import concurrent.futures
import math
import queue
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, cast

import trio

from trimesh._runtime.tasks import HeldBlock, Site, crossing, interrupt
from trimesh._wire.exceptions.tracebacks import without_own_frames
from trimesh.blocking.trio_thread import InterruptGuard, ThreadRun, check_thread, find_token, lease, release

P = ParamSpec("P")
T = TypeVar("T")
FaceT = TypeVar("FaceT")


class Cancelled(BaseException):
    """A wait was cancelled from Trio's side: its time limit expired, or the block around it failed.

    Like `trio.Cancelled` it is not an error: do not catch it. The block or time limit that it belongs to catches it
    and raises the cause.

    Attributes:
        limit: The time limit, if one expired.
    """

    def __init__(self, text: str, limit: TimeLimit | None = None) -> None:
        super().__init__(text)
        self.limit = limit


_limit: ContextVar[TimeLimit | None] = ContextVar("trimesh_blocking_limit", default=None)


def current_limit() -> TimeLimit | None:
    """Return the limit with the earliest deadline that the running code is in."""
    return _limit.get()


class TimeLimit:
    """A block whose waits end at a deadline, and which then raises `TimeoutError`; used once.

    Attributes:
        deadline: Its end, on the clock of `time.monotonic()`.
        cancelled_caught: Whether it ended a wait.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a time limit must be a number of seconds >= 0, got {seconds!r}")
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
            TimeoutError: The limit ended a wait.
        """
        if self._catches(error):
            raise TimeoutError(f"the time limit of {self.seconds:g} s is over") from None
        return None

    def _catches(self, error: BaseException | None) -> bool:
        _limit.set(self._around)
        self.cancelled_caught = isinstance(error, Cancelled) and error.limit is self
        return self.cancelled_caught


class QuietTimeLimit(TimeLimit):
    """A block whose waits end at a deadline, and after which the program then continues; used once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._catches(error)


def fail_after(seconds: float) -> TimeLimit:
    """Cancel waits of a block after some seconds, and raise `TimeoutError`: `with trimesh.blocking.fail_after(5): ...`.

    Calls are cancelled, on the remote side, too, and have unwound when it is raised. The remaining time travels with
    each call. Code that waits for nothing of trimesh is not interrupted.
    """
    return TimeLimit(seconds)


def move_on_after(seconds: float) -> QuietTimeLimit:
    """Like `fail_after`, but continue after the block; `limit.cancelled_caught` is True if the limit ended a wait."""
    return QuietTimeLimit(seconds)


class Crossing(crossing.Crossing[T, ThreadRun]):
    """Work in Trio within the time limit of its caller.

    Attributes:
        limit: The time limit; None for none.
    """

    def __init__(self, site: Site[ThreadRun]) -> None:
        super().__init__(site)
        self.limit: TimeLimit | None = current_limit()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may put into it

    def start(self, work: Callable[[], Awaitable[T]]) -> None:
        """Begin the work, with the time limit as a deadline."""

        async def work_in_time() -> T:
            if self.limit is not None:
                self.scope.deadline = trio.current_time() + self.limit.deadline - time.monotonic()
            return await work()

        super().start(work_in_time)

    @property
    def was_cancelled_around(self) -> bool:
        """True if the block around it was cancelled, not this work itself."""
        return self.was_cancelled and not self.scope.cancelled_caught

    def wake(self) -> None:
        """Wake the thread to process changes."""
        self._news.put(None)

    def wait(self, guard: InterruptGuard, until: Callable[[], bool], deadline: float = math.inf) -> None:
        """Wait until a condition holds or a deadline passes; Ctrl-C cancels the work meanwhile.

        Args:
            guard: Guard of the caller, which is on.
            until: The condition, evaluated after each change.
            deadline: Deadline on the clock of `time.monotonic()`.

        Raises:
            BaseException: Error of a signal handler of the program, raised when the work has ended.
        """
        before, guard.on_interrupt = guard.on_interrupt, self._interrupt
        if guard.has_come:
            self._interrupt()  # the Ctrl-C came before this wait
        raised: BaseException | None = None
        try:
            while not until() and (seconds := deadline - time.monotonic()) > 0:
                try:
                    self._news.get(timeout=None if seconds == math.inf else seconds)
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
        """Return the result of the ended work.

        Raises:
            Cancelled: A cancel ended it.
            BaseException: The error of the work.
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
        """Return the error by which the thread sees a cancel of the work."""
        limit = self.limit
        # The block around it may have the same deadline, and expire first.
        if limit is not None and (self.scope.cancelled_caught or time.monotonic() >= limit.deadline):
            return Cancelled("the time limit around it is over", limit)
        return Cancelled("the block around it was cancelled")


class FutureCrossing(Crossing[T]):
    """Work in Trio with a future.

    Attributes:
        future: Its future, which is set in the thread of Trio.
    """

    def __init__(self, site: Site[ThreadRun]) -> None:
        super().__init__(site)
        self.future = CallFuture[T](self)

    def wake(self) -> None:
        """Set the outcome of the future."""
        self.future.settle()


class CallFuture(concurrent.futures.Future[T]):
    """The future of a running call; see `concurrent.futures.Future`.

    `cancel` cancels the call, on the remote side, too. The future is done when the endpoint has unwound: cancelled, or
    with the error that the endpoint raised meanwhile. Callbacks run in the thread of Trio, and must not wait for calls.
    """

    def __init__(self, crossing: FutureCrossing[T]) -> None:
        super().__init__()
        self._crossing = crossing

    def running(self) -> bool:
        """Return whether the call is under way."""
        return not self.done()

    def cancel(self) -> bool:
        """Cancel the call; return False if it has ended already. `result()` waits until it has unwound."""
        if self.done():
            return False
        self._crossing.cancel("the future was cancelled")
        return True

    def settle(self) -> None:
        """Set the future's outcome from the ended work."""
        work = self._crossing
        if work.error is not None:
            self.set_exception(work.error)
        elif work.was_cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_result(cast("T", work.value))


_innermost: ContextVar[AnyBody | None] = ContextVar("trimesh_blocking_body", default=None)


class _Ended(Crossing[None]):
    """The crossing of a block, which closes it when the work has ended."""

    def __init__(self, site: Site[ThreadRun], body: AnyBody) -> None:
        super().__init__(site)
        self._body = body

    def wake(self) -> None:
        if self.is_done:
            self._body.is_open = False
        super().wake()


class Body(HeldBlock[T, Site[ThreadRun]], AbstractContextManager[T, "bool | None"]):
    """A block of Trio for a body in a thread; used once.

    Args:
        enter: Function that enters the block, in Trio.
        leave: Function that leaves it, in the same task; takes the error of the body, returns whether to suppress it.
        what: Name of the block, for messages.
        home: The block of the mesh that it is made on.

    Attributes:
        what: Name of the block, for messages.
        is_open: Whether it accepts work.
        around: The block around it.
        owns: The mesh that it was entered for.
        is_kept: Whether it stays open until `close`, not until the end of a `with`.
    """

    def __init__(
        self,
        enter: Callable[[], Awaitable[T]],
        leave: Callable[[BaseException | None], Awaitable[bool | None]],
        what: str,
        home: AnyBody | None = None,
    ) -> None:
        super().__init__(enter, leave)
        self.what = what
        self.is_open = False
        self.is_kept = False
        self.around: AnyBody | None = None
        self.owns: object = None
        self._home = home
        self._run: ThreadRun | None = None
        self._crossing: _Ended
        self._value: T | None = None
        self._is_entered = False
        self._is_over = False
        self._is_failing = False

    @property
    def site(self) -> Site[ThreadRun]:
        """The site for work of its body."""
        return self._site

    def __enter__(self) -> T:
        """Enter the block; see `enter`."""
        return self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave the block; see `leave`."""
        return self.leave(error)

    def enter(self, *, keep: bool = False) -> T:
        """Enter the block.

        Args:
            keep: Keep it open until `close`.

        Raises:
            Cancelled: The time limit expired, or the block around it was cancelled; nothing of the block is left.
            KeyboardInterrupt: Ctrl-C; nothing of the block is left.
            RuntimeError: It was entered before, or the caller is a Trio task.
        """
        check_thread()
        if self._run is not None:
            raise RuntimeError(f"{self.what} can be entered once, got a second `with`: make another one")
        self.is_kept = keep
        try:
            with InterruptGuard() as guard:
                self._run = lease()
                self._run.bodies.append(self)
                self._begin(guard)
            if not keep:
                _innermost.set(self)
            value, self._value = self._value, None
            return cast("T", value)
        except BaseException as error:
            if self._run is not None and not self._is_over:
                self.leave(error)  # Ctrl-C, after the guard
            raise

    def _begin(self, guard: InterruptGuard) -> None:
        run = self._run
        assert run is not None
        home = self._home if self._home is not None and self._home.is_open else None
        self.around = innermost(run) or home
        around = run.root if self.around is None else self.around.site
        self._site = Site(run, around)
        self._crossing = crossing = _Ended(around, self)
        try:
            crossing.start(self._live)
        except trio.RunFinishedError:
            self._finish()
            raise
        crossing.wait(guard, lambda: self._is_entered or crossing.is_done)
        if not self._is_entered or guard.has_come:
            self._end(guard, KeyboardInterrupt() if guard.has_come else None)
            raise crossing.cancelled()

    def leave(self, error: BaseException | None) -> bool:
        """Leave the block; return whether it suppressed the error of the body.

        Raises:
            BaseException: Error of the block.
        """
        if _innermost.get() is self:
            _innermost.set(self.around)
        if self._is_over or self._run is None or self._run.is_forgotten:
            return False
        try:
            with InterruptGuard() as guard:
                for inner in self.inner():
                    if inner.is_kept:
                        inner.leave(error)
                return self._end(guard, error)
        except BaseException as raised:
            without_own_frames(raised)
            raise

    def close(self) -> None:
        """Leave a block that stays open until `close`.

        Raises:
            RuntimeError: A block that was opened inside it is still open, or a `with` owns this one.
        """
        if not self.is_kept:
            raise RuntimeError(f"close() is for a mesh of open(), got {self.what} of a `with` block: leave that block")
        inner = self.inner()
        if inner:
            raise RuntimeError(f"close first what was opened inside: {inner[0].what} is still open in {self.what}")
        self.leave(None)

    def inner(self) -> list[AnyBody]:
        """Return the open blocks inside this one, the last first."""
        bodies = [] if self._run is None else self._run.bodies
        return [body for body in reversed(bodies) if body.around is self]

    def close_until(self, deadline: float) -> bool:
        """Leave the block at the exit of the interpreter; return whether it was left before the deadline."""
        with InterruptGuard() as guard:
            self._let_go()
            self._crossing.wait(guard, lambda: self._crossing.is_done, deadline)
        if self._crossing.error is not None:
            raise self._crossing.error
        return self._crossing.is_done

    def _end(self, guard: InterruptGuard, error: BaseException | None) -> bool:
        crossing = self._crossing
        self.is_open = False
        if isinstance(error, KeyboardInterrupt):
            interrupt.interrupt_elsewhere(kills=False)
        if isinstance(error, Cancelled) or not self._is_entered:
            crossing.cancel("the body of the block was cancelled")
        else:
            self._body_error = error
        self._let_go()
        try:
            crossing.wait(guard, lambda: crossing.is_done)
            if _is_interrupt_alone(crossing.error) and isinstance(error, KeyboardInterrupt):
                return False
            if crossing.error is not None and crossing.error is not error:
                raise crossing.error
            if crossing.error is not None or (error is not None and not self._is_suppressed):
                return False
            if crossing.was_cancelled:
                if self.around is not None:
                    self.around.check_failed(guard, crossing)
                raise crossing.cancelled()
            return self._is_suppressed
        finally:
            self._finish()
            del error  # no cycle of an error, its traceback and this frame

    def _finish(self) -> None:
        if not self._is_over and self._run is not None:
            self._is_over = True
            self._run.bodies.remove(self)
            release(self._run)

    def check_failed(self, guard: InterruptGuard, ended: Crossing[Any] | None = None) -> None:
        """Raise the failure of a block of `open()` that ends by itself, unless it was raised before.

        Args:
            guard: Guard of the caller, which is on.
            ended: Work that has just ended. If the block cancelled it, the block is failing, though `_tell_cancel` may
                not have run yet.
        """
        if not self.is_kept or self._is_over:
            return
        was_cancelled_here = ended is not None and ended.site is self.site and ended.was_cancelled_around
        if not (self._is_failing or was_cancelled_here or self._crossing.is_done):
            return
        self._crossing.wait(guard, lambda: self._crossing.is_done)
        self._finish()
        self._crossing.result()

    def _entered(self, value: T) -> None:
        self._value, self._is_entered, self.is_open = value, True, True
        if self.is_kept:
            self._crossing.scope.deadline = math.inf  # a time limit was for entering
        self._crossing.wake()

    def _tell_cancel(self) -> bool:
        self._is_failing = True
        return not self.is_kept

    def __repr__(self) -> str:
        return f"<block of {self.what}, {'open' if self.is_open else 'not open'}>"


AnyBody = Body[Any]


def _is_interrupt_alone(error: BaseException | None) -> bool:
    """Return whether a group has nothing but `KeyboardInterrupt` in it, which a script should raise bare."""
    if not isinstance(error, BaseExceptionGroup):
        return False
    group = cast("BaseExceptionGroup[BaseException]", error)
    return group.split(KeyboardInterrupt)[1] is None


def innermost(run: ThreadRun | None = None) -> AnyBody | None:
    """Return the innermost open `with` block of `trimesh.blocking` around the running code."""
    body = _innermost.get()
    while body is not None and not (body.is_open and (run is None or body.site.run is run)):
        body = body.around
    return body


class FacedBody(AbstractContextManager[FaceT], Generic[T, FaceT]):
    """A `with` block of a thread that gives the blocking form of its value."""

    def __init__(self, body: Body[T], face: Callable[[T], FaceT]) -> None:
        self._body = body
        self._face = face

    def __enter__(self) -> FaceT:
        return self._face(self._body.enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._body.leave(error)


def body_of(block: AbstractAsyncContextManager[T], what: str, home: AnyBody | None = None) -> Body[T]:
    """Return a body for an async context manager of Trio."""

    async def leave(error: BaseException | None) -> bool | None:
        if error is None:
            return await block.__aexit__(None, None, None)
        return await block.__aexit__(type(error), error, error.__traceback__)

    return Body(block.__aenter__, leave, what, home)


# ---- work: calls of async functions from this thread -----------------------------------------------------------------

_END: Final = object()


def wait(
    work: Callable[[], Awaitable[T]], home: AnyBody | None = None, put_back: Callable[[T], None] | None = None
) -> T:
    """Run work in Trio, and wait for its result.

    Args:
        work: Function to call.
        home: The block of the mesh that it is for, in which it runs if the running code is in no block.
        put_back: Called with a result that the caller does not get, because of a Ctrl-C.
    """
    check_thread()
    with InterruptGuard() as guard:
        body = _find_body(home)
        if body is None and find_token() is not None:
            # With the scopes and deadline of the task that started the thread, and its own limit.
            return trio.from_thread.run(_within, current_limit(), work)
        if home is not None:
            home.check_failed(guard)
        site, leased = _find_site(body)
        crossing = Crossing[T](site)
        try:
            crossing.start(work)
            crossing.wait(guard, lambda: crossing.is_done)
            if guard.has_come and put_back is not None and crossing.error is None and not crossing.was_cancelled:
                put_back(cast("T", crossing.value))
            return crossing.result()
        except BaseException as error:
            if home is not None and not (isinstance(error, Cancelled) and error.limit is not None):
                home.check_failed(guard, crossing)
            raise
        finally:
            if leased is not None:
                release(leased)


def wait_now(function: Callable[[], T], home: AnyBody | None = None) -> T:
    """Call a function that does not wait in Trio, and return its result."""

    async def call() -> T:
        return function()

    return wait(call, home)


def submit(work: Callable[[], Awaitable[T]], home: AnyBody | None = None, *, at_home: bool = False) -> CallFuture[T]:
    """Start work in Trio; return its future. Leaving the block waits for it.

    Args:
        work: Function to call.
        home: The block of the mesh that it is for.
        at_home: Whether that block owns it even if the running code is in another block inside it.
    """
    check_thread()
    with InterruptGuard() as guard:
        if home is not None:
            home.check_failed(guard)
        site, leased = _find_site(home if at_home and home is not None and home.is_open else _find_body(home))
        crossing = FutureCrossing[T](site)
        if leased is not None:
            crossing.future.add_done_callback(lambda _: release(leased))
        crossing.start(work)
        return crossing.future


def enter(block: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
    """Return a context manager for `with` from an async one of Trio: `with tb.enter(buffer.map()) as view:`."""
    return body_of(block, repr(block))


class Each(Iterator[T]):
    """The items of an async iterator of Trio.

    Args:
        items: The async iterator.
        home: The block of the mesh that it belongs to.
    """

    def __init__(self, items: AsyncIterator[T], home: AnyBody | None = None) -> None:
        self._items = items
        self._home = home
        self._taken: list[Any] = []

    @property
    def has_kept(self) -> bool:
        """True if an item arrived together with a Ctrl-C, and was not returned."""
        return bool(self._taken)

    def take_kept(self) -> T:
        """Return the item that `has_kept` is about."""
        found: T = self._taken.pop()
        return found

    def __next__(self) -> T:
        """Wait for the next item; an item that arrives together with a Ctrl-C is not lost."""
        found = self._taken.pop() if self._taken else wait(self._step, self._home, self._taken.append)
        if found is _END:
            raise StopIteration
        return cast("T", found)

    async def _step(self) -> Any:
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            return _END


def _find_body(home: AnyBody | None) -> AnyBody | None:
    body = innermost()
    if body is None and home is not None and home.is_open:
        body = home
    if body is not None and body.site.run.is_forgotten:
        raise RuntimeError(
            "handles work in the process whose block owns them, got them in a process that was forked from it: open a "
            "block here, or use the handles there"
        )
    return body


def _find_site(body: AnyBody | None) -> tuple[Site[ThreadRun], ThreadRun | None]:
    """Return the site to do work at, and the run leased for it."""
    if body is not None:
        return body.site, None
    leased = lease()
    return leased.root, leased


async def _within(limit: TimeLimit | None, work: Callable[[], Awaitable[T]]) -> T:
    """Do work of a thread that Trio started.

    Raises:
        Cancelled: The time limit around it expired, and the work has unwound.
    """
    if limit is None:
        return await work()
    with trio.CancelScope(deadline=trio.current_time() + limit.deadline - time.monotonic()):
        return await work()
    raise Cancelled("the time limit around it is over", limit)
