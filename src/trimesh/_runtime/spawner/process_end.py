"""The end of a worker (rule O3): threads, `atexit` functions, finalizers, flushed streams, `os._exit`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import types
from typing import NoReturn

from trimesh import limits


def end_process(code: int, signum: int | None = None) -> NoReturn:
    """End as rule O3 says: threads (bounded), atexit functions, flush, `os._exit`; the interpreter is not finalised.

    Args:
        signum: A signal whose default action ends the process instead, so that its status says what has ended it.
    """

    def expire(_signum: int, _frame: types.FrameType | None) -> None:
        current = threading.current_thread()
        names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not current]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(
                f"trimesh: the process ends although threads still run after {limits.THREAD_SHUTDOWN_SECONDS} s: "
                f"{', '.join(names)}\n"
            )
        # From within the wait: how an exception would come out of it differs between Python versions.
        _leave(code, signum)

    try:
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, limits.THREAD_SHUTDOWN_SECONDS)
        # What finalisation does: tells pools to end, then waits for threads that are no daemons.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:  # noqa: BLE001 - a broken hook of a module must not keep the process
        sys.excepthook(type(error), error, error.__traceback__)
    _leave(code, signum)


def _leave(code: int, signum: int | None) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter itself calls
        if signum is None:
            _finalize_cycles(code)
    finally:
        _flush()
        if signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        os._exit(code & 0xFF)


def _finalize_cycles(code: int) -> None:
    """Run `__del__` and finalizers of what only reference cycles keep, as the interpreter would: those of actors, say.

    One that does not return is cut off after `limits.FINALIZE_SECONDS`.
    """

    def expire(*_: object) -> NoReturn:
        _flush()
        os._exit(code & 0xFF)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limits.FINALIZE_SECONDS)
    gc.collect()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a reader that is gone, a stream that was closed
            stream.flush()
