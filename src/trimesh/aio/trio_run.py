"""Trio run of an asyncio loop: a guest of that loop, or an existing run.

    none --lease()--> starting --> serving --last release()--> ending --> none

RUN-1 a loop has one at a time; nested and sibling blocks share it.
RUN-2 the last release waits until it has ended, despite any cancels: nothing is left of a guest.
RUN-3 an unrequested end fails everything that waits for it, with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import attrs
import outcome
import trio

from trimesh._runtime.system import is_thread_of_parent
from trimesh._runtime.tasks import Waiting, split_cancelled
from trimesh._transport.native.loop_waits import loop_wait
from trimesh.aio.driver import WAIT_CODE, LoopDriver, adopt_guest
from trimesh.aio.sites import AsyncioSite
from trimesh.errors import TrimeshInternalError


@attrs.define(eq=False)
class TrioRun(ABC):
    """One Trio run as an asyncio loop sees it; all methods but `_serve` are called in the thread of that loop.

    Attributes:
        loop: The loop whose tasks use it.
        root: The outermost site.
        users: Number of open blocks.
        is_ending: Whether the last block has been left.
        waiting: Waits for work in Trio, which fail if the run ends by itself.
        token: Token of the run, once it serves.
        driver: Driver of its turns in the loop; None if it runs by itself or waits in a thread.
    """

    loop: asyncio.AbstractEventLoop
    users: int = 0
    is_ending: bool = False
    waiting: set[Waiting] = attrs.field(factory=set[Waiting])
    token: trio.lowlevel.TrioToken | None = None
    driver: LoopDriver | None = None
    root: AsyncioSite = attrs.field(init=False)
    _serving: asyncio.Event = attrs.field(factory=asyncio.Event)
    _ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    _end: trio.Event = attrs.field(factory=trio.Event)
    _error: BaseException | None = None

    def __attrs_post_init__(self) -> None:
        self.root = AsyncioSite(self, None)

    @abstractmethod
    def _launch(self) -> None:
        """Start `_serve` in Trio."""

    @abstractmethod
    def post(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread of Trio.

        Raises:
            trio.RunFinishedError: The run is over.
        """

    @abstractmethod
    def tell(self, function: Callable[[], object]) -> bool:
        """Call `function` in the thread of asyncio; return False if its loop is closed. Called from Trio's side."""

    @abstractmethod
    def run_now(self, function: Callable[[], Any]) -> Any:
        """Call `function`, which does not wait, in the thread of Trio; return its result."""

    async def wait_serving(self) -> None:
        """Wait until the run accepts work."""
        await self._serving.wait()
        if self._error is not None:
            raise _broken(self._error)

    async def wait_ended(self) -> None:
        """Wait until it is over."""
        await self._ended.wait()

    async def release(self) -> None:
        """Give the lease back; the last user ends the run and waits for its end.

        Raises:
            KeyboardInterrupt: Trio received a Ctrl-C meanwhile.
            TrimeshInternalError: The run ended by an error.
        """
        self.give_up()
        if self.users > 0:
            return
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.is_set():
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if isinstance(self._error, KeyboardInterrupt):
            raise self._error
        if self._error is not None:
            raise _broken(self._error)
        if cancelled is not None:
            raise cancelled

    def give_up(self) -> None:
        """Give the lease back without waiting for the end of the run."""
        self.users -= 1
        if self.users == 0:
            self.is_ending = True
            self.root.is_open = False
            with suppress(trio.RunFinishedError):
                self.post(self._end.set)

    @trio.lowlevel.enable_ki_protection
    async def _serve(self) -> None:
        """Hold the nursery of the outermost site open until the last user has released it."""
        interrupt: KeyboardInterrupt | None = None
        is_cut = False
        async with trio.open_nursery() as nursery:
            self.root.work_in(nursery)
            self.token = trio.lowlevel.current_trio_token()
            is_there = self.tell(self._opened)
            while is_there and not self._end.is_set():
                try:
                    with trio.CancelScope(shield=is_cut):
                        await self._end.wait()
                except (KeyboardInterrupt, trio.Cancelled) as error:
                    interrupt = error if isinstance(error, KeyboardInterrupt) else interrupt
                    is_cut = True
                    is_there = self.tell(_nothing)  # a loop that was closed in a block never leaves it
                    nursery.cancel_scope.cancel(reason="Ctrl-C" if interrupt is not None else "Trio is ending")
            nursery.cancel_scope.cancel()
        if interrupt is not None:
            raise interrupt

    @trio.lowlevel.enable_ki_protection
    async def _serve_as_system_task(self) -> None:
        result: outcome.Outcome[None] = outcome.Value(None)
        try:
            await self._serve()
        except BaseException as error:  # noqa: BLE001 - a system task must not raise; release() does
            cancelled, rest = split_cancelled(error)
            if rest is not None:
                result = outcome.Error(rest)
            if cancelled is not None:
                raise cancelled from None
        finally:
            self.tell(partial(self._closed, result))

    def _opened(self) -> None:
        self.root.is_open = True
        self._serving.set()

    def _closed(self, result: outcome.Outcome[None]) -> None:
        """Handle the end of the run."""
        self.root.is_open = False
        if isinstance(result, outcome.Error):
            self._error = result.error
        elif not self.is_ending:
            self._error = trio.RunFinishedError("the Trio run has ended")
        for waiting in list(self.waiting):
            waiting.fail(_broken(self._error))
        if _runs.get(self.loop) is self:
            del _runs[self.loop]
        self._serving.set()
        self._ended.set()


@attrs.define(eq=False)
class Guest(TrioRun):
    """A guest of the asyncio loop, in its thread: both sides call each other directly."""

    _guard: InterruptGuard | None = None
    _bell: SignalBell | None = None

    def _launch(self) -> None:
        self._guard = guard_interrupts()
        self._bell = hang_bell(self.loop)
        trio.lowlevel.start_guest_run(
            self._serve,
            run_sync_soon_threadsafe=self.loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=adopt_guest(self.loop, self._driven),
            done_callback=self._finished,
            host_uses_signal_set_wakeup_fd=True,  # by the bell, or by asyncio itself
            restrict_keyboard_interrupt_to_checkpoints=True,  # Trio must not interrupt asyncio tasks
        )

    def give_up(self) -> None:
        super().give_up()
        if self.is_ending and self._guard is not None:
            self._guard.is_armed = False  # a `KeyboardInterrupt` would break the wait for that end

    def _driven(self, driver: LoopDriver) -> None:
        self.driver = driver

    def _finished(self, result: outcome.Outcome[None]) -> None:
        self._closed(result)
        if self._bell is not None:
            self._bell.take_off()
        if self._guard is not None:
            self._guard.take_off()

    def post(self, function: Callable[[], object]) -> None:
        if self._ended.is_set():
            raise trio.RunFinishedError("the Trio run has ended")
        function()

    def tell(self, function: Callable[[], object]) -> bool:
        function()
        return True

    def run_now(self, function: Callable[[], Any]) -> Any:
        return _run_beside(function, self.token)


class Local(TrioRun):
    """The run of this thread: the program has made Trio a guest of its loop itself."""

    def _launch(self) -> None:
        wait = loop_wait.get()
        self.driver = wait if isinstance(wait, LoopDriver) else None
        trio.lowlevel.spawn_system_task(self._serve_as_system_task, name="trimesh.aio")

    def post(self, function: Callable[[], object]) -> None:
        if not trio.lowlevel.in_trio_run():
            raise trio.RunFinishedError("the Trio run has ended")
        function()

    def tell(self, function: Callable[[], object]) -> bool:
        function()
        return not self.loop.is_closed()

    def run_now(self, function: Callable[[], Any]) -> Any:
        return _run_beside(function, self.token)


class Neighbour(TrioRun):
    """The run of another thread."""

    def _launch(self) -> None:
        self.post(partial(trio.lowlevel.spawn_system_task, self._serve_as_system_task, name="trimesh.aio"))

    def post(self, function: Callable[[], object]) -> None:
        assert self.token is not None
        self.token.run_sync_soon(function)

    def tell(self, function: Callable[[], object]) -> bool:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def run_now(self, function: Callable[[], Any]) -> Any:
        return trio.from_thread.run_sync(function, trio_token=self.token)


_runs: Final[dict[asyncio.AbstractEventLoop, TrioRun]] = {}


def find_run(loop: asyncio.AbstractEventLoop) -> TrioRun | None:
    """Return the run that a loop uses, if it accepts work."""
    run = _runs.get(loop)
    return run if run is not None and run.root.is_open else None


def find_token() -> trio.lowlevel.TrioToken | None:
    """Return the token of the Trio run that started this thread; None if none did."""
    if is_thread_of_parent():
        return None
    try:
        return trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
    except RuntimeError:  # this thread was not started by Trio, or that run has ended
        return None


async def lease(token: trio.lowlevel.TrioToken | None = None) -> TrioRun:
    """Lease the Trio run of the running loop; the first lease starts it. The caller releases it.

    Args:
        token: Token of a run in another thread. None: the run that this thread has, or the one that started this
            thread, else a new guest of the loop.
    """
    loop = running_loop()
    while (run := _runs.get(loop)) is not None and run.is_ending:
        await run.wait_ended()
    if run is None:
        for abandoned in [old for old in _runs if old.is_closed()]:
            del _runs[abandoned]
        run = _choose(loop, token)
        run._launch()  # noqa: SLF001 - its own module
        _runs[loop] = run
    run.users += 1
    try:
        await run.wait_serving()
    except BaseException:
        await run.release()
        raise
    return run


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the running asyncio task.

    Raises:
        RuntimeError: There is none.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "trimesh.aio must be used in a task of asyncio, got code outside of one: run it by asyncio.run(...), or "
            "use trimesh in trio.run(...), or trimesh.blocking"
        ) from None


def _choose(loop: asyncio.AbstractEventLoop, token: trio.lowlevel.TrioToken | None) -> TrioRun:
    if token is None and trio.lowlevel.in_trio_run():
        return Local(loop)
    token = token or find_token()
    return Guest(loop) if token is None else Neighbour(loop, token=token)


def _run_beside(function: Callable[[], Any], token: trio.lowlevel.TrioToken | None) -> Any:
    """Call a function in the thread of Trio, which is this one, between two of its turns."""
    result = function()
    if token is not None:
        token.run_sync_soon(_nothing, idempotent=True)  # a turn of Trio, which flushes sent messages
    return result


def _broken(error: BaseException | None) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    broken = TrimeshInternalError("the Trio run that does the work of this asyncio loop has ended")
    broken.__cause__ = error
    return broken


def _nothing() -> None:
    """Do nothing."""


# ---- Ctrl-C in an asyncio program whose loop has Trio as its guest ---------------------------------------------------

# `asyncio.run` handles the first SIGINT by cancelling the main task, which leaves blocks in order. On the second its
# handler raises `KeyboardInterrupt` wherever the program is. In the middle of Trio that would break the run, so the
# guard below prevents it there.

_TRIO: Final = ("trio.", "trimesh.")
_NO_DESCRIPTOR: Final = -1
"""Value of `signal.set_wakeup_fd` for none."""


class InterruptGuard:
    """Wraps the SIGINT handler of `asyncio.run`: raises `KeyboardInterrupt` once, and only where that breaks nothing.

    It does not raise in the middle of Trio, nor between two callbacks of asyncio: there the next callback, and the task
    that it wakes, would be lost, and `asyncio.run` would wait for ever for the end of that task.

    Args:
        handler: The handler of `asyncio.run`.

    Attributes:
        is_armed: Whether it may raise now.
    """

    def __init__(self, handler: partial[Any]) -> None:
        self.is_armed = True
        self._handler = handler
        self._has_raised = False
        self._is_trio_over = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        try:
            self._handler(signum, frame)
        except KeyboardInterrupt:
            if self.is_armed and not self._has_raised and _breaks_nothing(frame):
                self._has_raised = True  # this one ends the loop; another one would break its clean-up
                if self._is_trio_over:
                    self._put_back()
                raise

    def take_off(self) -> None:
        """Remove the guard as soon as possible: after Trio's end it may still have to wake a sleeping main task."""
        if self._has_raised or self._main_task.done():
            self._put_back()
            return
        self.is_armed = self._is_trio_over = True
        self._main_task.add_done_callback(self._put_back)

    def serve_again(self) -> None:
        """Guard another Trio run, before the guard has been removed."""
        self._is_trio_over = False

    @property
    def _main_task(self) -> asyncio.Task[Any]:
        return cast("asyncio.Task[Any]", self._handler.keywords["main_task"])

    def _put_back(self, _: object = None) -> None:
        """Restore the handler of `asyncio.run`, or Python's own if that run is over and could not do so itself."""
        current: Any = signal.getsignal(signal.SIGINT)
        if current is self:
            is_over = self._has_raised or self._main_task.done()
            signal.signal(signal.SIGINT, signal.default_int_handler if is_over else self._handler)


def guard_interrupts() -> InterruptGuard | None:
    """Put a guard around the handler of `asyncio.run`, if that is installed; reuse a guard that is still there."""
    current: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        return None
    if isinstance(current, InterruptGuard):
        current.serve_again()
        return current
    if not _is_of_asyncio(current):
        return None
    guard = InterruptGuard(current)
    signal.signal(signal.SIGINT, guard)
    return guard


class SignalBell:
    """Lets every signal wake an asyncio loop.

    Python runs signal handlers between two instructions of the main thread. A signal that arrives just before the loop
    sleeps would wait until something else wakes it; asyncio prevents that only for `loop.add_signal_handler`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.settimeout(0)
        loop.add_reader(self._receiver, self._rung)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def take_off(self) -> None:
        """Remove the bell, unless other code has replaced the wakeup descriptor meanwhile."""
        current = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if current not in (_NO_DESCRIPTOR, self._sender.fileno()):
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._loop.remove_reader(self._receiver)
        self._receiver.close()
        self._sender.close()


def hang_bell(loop: asyncio.AbstractEventLoop) -> SignalBell | None:
    """Let signals wake `loop`, if it runs in the main thread and no wakeup descriptor is set yet."""
    if threading.current_thread() is not threading.main_thread():
        return None
    current = signal.set_wakeup_fd(_NO_DESCRIPTOR)
    if current != _NO_DESCRIPTOR:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return None
    return SignalBell(loop)


def _is_of_asyncio(handler: Any) -> bool:
    is_of_runner = isinstance(handler, partial) and getattr(handler.func, "__module__", "") == "asyncio.runners"
    return is_of_runner and "main_task" in handler.keywords


def _breaks_nothing(frame: FrameType | None) -> bool:
    """Return whether an exception may be raised in a frame: in the user's code, or while the loop sleeps."""
    if frame is not None and _module(frame).startswith("asyncio."):
        return False  # a callback that is lost there may be the next turn of Trio
    while frame is not None:
        if frame.f_code is not WAIT_CODE and _module(frame).startswith(_TRIO):
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
