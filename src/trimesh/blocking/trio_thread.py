"""Trio run for the work of threads: in a thread of its own, or the run that started the calling thread.

TT-1 a program has at most one such thread; it starts with the first block and ends with the last.
TT-2 leaving the last block waits until that thread has ended.
TT-3 a forked process inherits no run of its parent.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from trimesh import limits
from trimesh._runtime.actors import runs_with_meshes
from trimesh._runtime.life import find_proc
from trimesh._runtime.system import is_thread_of_parent
from trimesh._runtime.tasks import Site, Waiting, interrupt
from trimesh.errors import TrimeshInternalError

if TYPE_CHECKING:
    from trimesh.blocking.work import AnyBody

_log = logging.getLogger("trimesh")


class ThreadRun(ABC):
    """One Trio run, as seen by threads that use it.

    Attributes:
        root: The outermost site.
        users: Number of open blocks and of waits outside of blocks.
        waiting: Waits for work in it, which fail if the run ends by itself.
        bodies: Open blocks, in the order in which they were entered.
        is_forgotten: Whether the run is in the process that this one was forked from.
    """

    def __init__(self) -> None:
        self.root: Site[ThreadRun] = Site(self, None)
        self.users = 0
        self.waiting: set[Waiting] = set()
        self.bodies: list[AnyBody] = []
        self.is_forgotten = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._end = trio.Event()
        self._served = threading.Event()
        self._error: BaseException | None = None

    @abstractmethod
    def launch(self) -> None:
        """Start `_serve` in Trio; return when it serves."""

    def post(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread of Trio.

        Raises:
            trio.RunFinishedError: The run is over.
        """
        if self._token is None or not self.root.is_open or self.is_forgotten:
            raise trio.RunFinishedError("the Trio run of these blocks has ended")
        self._token.run_sync_soon(function)

    def tell(self, function: Callable[[], object]) -> bool:
        """Call `function` at once, in Trio's thread: it sets something for which the other thread waits."""
        function()
        return True

    @trio.lowlevel.enable_ki_protection
    async def _serve(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self.root.work_in(nursery)
                self._token = trio.lowlevel.current_trio_token()
                self.root.is_open = True
                self._served.set()
                await self._end.wait()
                nursery.cancel_scope.cancel(reason="the last block was left")
        finally:
            self.root.is_open = False

    def _over(self, error: BaseException | None) -> None:
        self._error = error
        self._served.set()
        for waiting in list(self.waiting):
            waiting.fail(_broken(error))

    def check(self) -> None:
        """Raise if the run is broken."""
        if self._error is not None:
            raise _broken(self._error)

    @abstractmethod
    def ended(self) -> None:
        """Let the run end, after its last release."""

    def _let_end(self) -> None:
        with suppress(trio.RunFinishedError):
            self.post(self._end.set)


class OwnThread(ThreadRun):
    """A run in a thread of its own."""

    def launch(self) -> None:
        # A daemon: otherwise the interpreter would wait for it at exit, before open blocks can be closed.
        self._thread = threading.Thread(target=self._run, name="trimesh.blocking", daemon=True)
        self._thread.start()
        self._served.wait()
        self.check()
        close_at_exit(self)
        interrupt.heed_sigterm()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            error = raised
        self._over(error)

    async def _main(self) -> None:
        interrupt.hear_elsewhere()
        await self._serve()

    def ended(self) -> None:
        """See `ThreadRun.ended`; waits until the thread has ended."""
        self._let_end()
        if threading.current_thread() is not self._thread:  # it is when a future releases the run last
            self._thread.join()
            interrupt.ignore_sigterm()
            self.check()
        else:
            interrupt.ignore_sigterm()


class ThreadOfTask(ThreadRun):
    """The run that started this thread, as for an endpoint with `thread=True`."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        super().__init__()
        self._started_by = token

    def launch(self) -> None:
        trio.from_thread.run_sync(self._start, trio_token=self._started_by)
        self._served.wait()

    def _start(self) -> None:
        proc = find_proc()
        if proc is not None and proc.family is not None and proc.family.root is not None:
            proc.actors.start_soon(self._serve_in_task)  # in a worker calls must end before links are closed
        else:
            trio.lowlevel.spawn_system_task(self._serve_in_task)

    async def _serve_in_task(self) -> None:
        error: BaseException | None = None
        try:
            await self._serve()
        except trio.Cancelled:
            raise
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            error = raised
        finally:
            self._over(error)

    def ended(self) -> None:
        self._let_end()


_lock = threading.Lock()
_own: OwnThread | None = None
_of_tasks: dict[trio.lowlevel.TrioToken, ThreadOfTask] = {}


def find_token() -> trio.lowlevel.TrioToken | None:
    """Return the token of the Trio run that started this thread; None if none did."""
    if is_thread_of_parent():
        return None
    try:
        return trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
    except RuntimeError:  # this thread was not started by Trio, or that run has ended
        return None


def check_thread() -> None:
    """Check that the caller may block.

    Raises:
        RuntimeError: It is in a Trio task, whose loop it would block.
    """
    if trio.lowlevel.in_trio_task():
        raise RuntimeError(
            "trimesh.blocking must not be used in a Trio task, whose loop it would block, nor in functions that such a "
            "task calls (a plain endpoint, a callback of a future): await the handles of `trimesh`, or mark the "
            "endpoint with thread=True"
        )


def lease() -> ThreadRun:
    """Lease the Trio run of this thread; the first lease starts it. The caller releases it."""
    global _own  # noqa: PLW0603 - one for the process
    token = find_token()
    with _lock:
        if token is None and _own is None:
            token = _only_run()
        run: ThreadRun | None = _own if token is None else _of_tasks.get(token)
        if run is None:
            run = OwnThread() if token is None else ThreadOfTask(token)
            run.launch()
            if token is not None:
                _of_tasks[token] = run  # type: ignore[assignment]
            else:
                _own = run  # type: ignore[assignment]
        run.users += 1
        return run


def _only_run() -> trio.lowlevel.TrioToken | None:
    """Return the one Trio run of this process with open meshes, for a thread that no run started; None if none has any.

    Raises:
        RuntimeError: There are several.
    """
    runs = runs_with_meshes()
    if len(runs) > 1:
        raise RuntimeError(
            f"a thread must be started by the Trio run whose meshes it uses if several have meshes, got one that none "
            f"of the {len(runs)} runs started: start it by trio.to_thread.run_sync in the right one"
        )
    return runs[0] if runs else None


def release(run: ThreadRun) -> None:
    """Release a run; the last release ends it.

    Raises:
        TrimeshInternalError: The run ended by an error.
    """
    global _own  # noqa: PLW0603
    with _lock:
        run.users -= 1
        if run.users > 0 or run.is_forgotten:
            return
        if run is _own:
            _own = None
        for token in [token for token, one in _of_tasks.items() if one is run]:
            del _of_tasks[token]
        run.ended()  # under the lock, so that a new lease waits and there is one thread at a time


def _forget() -> None:
    """Drop all runs in a process that was just forked, which does not have its parent's threads."""
    global _own, _lock
    for run in itertools.chain([_own] if _own is not None else [], _of_tasks.values()):
        run.is_forgotten = True
    _own, _lock = None, threading.Lock()
    _of_tasks.clear()


os.register_at_fork(after_in_child=_forget)


def _broken(error: BaseException | None) -> BaseException:
    broken = TrimeshInternalError("the Trio run that does the work of this thread has ended")
    broken.__cause__ = error
    return broken


# ---- exit of the interpreter: closes blocks that are still open ------------------------------------------------------

_runs: Final[weakref.WeakSet[ThreadRun]] = weakref.WeakSet()


def close_at_exit(run: ThreadRun) -> None:
    """Close the blocks of a run at the exit of the interpreter."""
    if not _runs:
        atexit.unregister(close_open_blocks)
        atexit.register(close_open_blocks)  # again, so that it runs before handlers of later imports
    _runs.add(run)


def close_open_blocks() -> None:
    deadline = time.monotonic() + limits.EXIT_SECONDS
    for run in _runs:
        if run.is_forgotten:
            continue
        for body in reversed(list(run.bodies)):
            _log.warning(
                "%s was still open at the exit of the interpreter and is closed, in at most %g s "
                "(limits.EXIT_SECONDS): write `with`, or call close()",
                body.what,
                limits.EXIT_SECONDS,
            )
            try:
                is_over = body.close_until(deadline)
            except BaseException:  # noqa: BLE001 - the interpreter ends in any case
                _log.exception("failed to close %s", body.what)
            else:
                if not is_over:
                    _log.warning("%s did not end in time: the end of this process kills its processes", body.what)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


class InterruptGuard:
    """Handler of Ctrl-C while the main thread waits for work in Trio, which has a thread of its own.

    Python raises `KeyboardInterrupt` between any two instructions of the main thread, so also between the start of some
    work and the wait for its end. While a guard is on, Ctrl-C cancels the work instead, and is raised when the work
    has ended, on the remote side, too. A further Ctrl-C while a block is being left kills (rule O6). In other threads,
    inside another guard, and if the program has its own handler, the guard does nothing.

    Attributes:
        has_come: True after a Ctrl-C.
        on_interrupt: Cancels the work that the thread waits for.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.on_interrupt: Callable[[], object] | None = None
        self._is_on = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            current: Any = signal.getsignal(signal.SIGINT)
            if current is signal.default_int_handler:
                self._is_on = True
                signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the guard.

        Raises:
            KeyboardInterrupt: Ctrl-C came; its context is the error raised meanwhile.
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
