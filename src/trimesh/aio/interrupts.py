"""Ctrl-C in an asyncio program whose loop has Trio as its guest.

`asyncio.run` handles SIGINT by cancelling the main task, so blocks are left as they should be. The second time its
handler raises `KeyboardInterrupt` wherever the program is, and that may be in the middle of Trio, which does not
survive it. So its handler is kept from that.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from functools import partial
from types import FrameType
from typing import Any, Final, cast

from trimesh.aio.driver import WAIT_CODE

_TRIO: Final = ("trio.", "trimesh.")
_NO_DESCRIPTOR: Final = -1
"""As the descriptor that signals are written to: there is none."""


class InterruptGuard:
    """The handler of `asyncio.run`, which raises once, and only where that breaks nothing.

    Not in the middle of Trio, and not between two callbacks of asyncio: it would lose the one that is about to run, and
    with it the task that this one wakes; `asyncio.run` then waits for ever for the end of that task.

    Args:
        handler: Of `asyncio.run`.

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
                self._has_raised = True  # the loop ends by this one, and another one would break its end
                if self._is_trio_over:
                    self._put_back()
                raise

    def take_off(self) -> None:
        """Take it off as soon as it may be: Trio has ended, but the main task can still be left asleep for ever."""
        if self._has_raised or self._main_task.done():
            self._put_back()
            return
        self.is_armed = self._is_trio_over = True
        self._main_task.add_done_callback(self._put_back)

    def serve_again(self) -> None:
        """Guard another run of Trio before it has been taken off."""
        self._is_trio_over = False

    @property
    def _main_task(self) -> asyncio.Task[Any]:
        return cast("asyncio.Task[Any]", self._handler.keywords["main_task"])

    def _put_back(self, _: object = None) -> None:
        """Put the handler of `asyncio.run` back, or Python's own where that run is over, which could not do so."""
        current: Any = signal.getsignal(signal.SIGINT)
        if current is self:
            is_over = self._has_raised or self._main_task.done()
            signal.signal(signal.SIGINT, signal.default_int_handler if is_over else self._handler)


def guard_interrupts() -> InterruptGuard | None:
    """Put a guard around the handler of `asyncio.run`, where that is in place; one that is still there serves again."""
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
    """Has every signal wake an asyncio loop.

    Python runs the handler of a signal between two instructions of the main thread. One that comes just before the loop
    goes to sleep would wait until something else wakes it; asyncio sees to that only for `loop.add_signal_handler`.
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
        """Undo it, unless others have taken the signals over meanwhile."""
        current = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if current not in (_NO_DESCRIPTOR, self._sender.fileno()):
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._loop.remove_reader(self._receiver)
        self._receiver.close()
        self._sender.close()


def hang_bell(loop: asyncio.AbstractEventLoop) -> SignalBell | None:
    """Have signals wake `loop`, if it runs in the main thread and nothing is woken by them yet."""
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
    """Tell whether an exception may be raised in a frame: in code of the user, or while the loop sleeps."""
    if frame is not None and _module(frame).startswith("asyncio."):
        return False  # a callback that is lost there may be the next tick of Trio
    while frame is not None:
        if frame.f_code is not WAIT_CODE and _module(frame).startswith(_TRIO):
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
