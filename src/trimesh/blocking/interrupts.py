"""Ctrl-C while the main thread waits for work in Trio, which has a thread of its own.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, so also between the start of some
work and the wait for its end. While a guard is on, Ctrl-C cancels the work instead, and is raised when that has ended:
what was called is over then, on the other side, too. Ctrl-C while a block is being left after that kills (rule O6).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trimesh._runtime.tasks import interrupt


class InterruptGuard:
    """Takes Ctrl-C in the main thread; elsewhere, inside another guard, and where the program has a handler, nothing.

    Attributes:
        has_come: Whether there was one.
        on_interrupt: What cancels the work that is waited for.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.on_interrupt: Callable[[], object] | None = None
        self._is_on = False

    def __enter__(self) -> Self:
        """Put it on."""
        if threading.current_thread() is threading.main_thread():
            current: Any = signal.getsignal(signal.SIGINT)
            if current is signal.default_int_handler:
                self._is_on = True
                signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take it off.

        Raises:
            KeyboardInterrupt: There was one; its context is what has been raised meanwhile.
        """
        if self._is_on:
            self._is_on = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.has_come and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True
        if not interrupt.interrupt_elsewhere() and self.on_interrupt is not None:
            self.on_interrupt()
