"""Children that user code forks: inherited state that they must release, and the point where they end.

A child forked by code of an actor does not become a second worker. It is free in its own code, and may open meshes of
its own, but it ends where the forking step of the task ends, or the function of the forking thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

import trio

from trimesh._runtime.system import linux
from trimesh._runtime.system.seeds import when_imported
from trimesh._wire.pickled.by_value import MAIN_NAMES, find


class Forgettable(Protocol):
    """State that only this process may use."""

    def forget(self) -> None:
        """In a forked child: close the copies of descriptors, at once and without a message to other processes."""


T = TypeVar("T", bound=Forgettable)


class ForgottenInChildren(Generic[T]):
    """Open objects of one kind, which a forked child forgets. Held weakly."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[T] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def add(self, thing: T) -> None:
        """Register an open object."""
        self._open.add(thing)

    def discard(self, thing: T) -> None:
        """Unregister a closed object. Idempotent."""
        self._open.discard(thing)

    def __contains__(self, thing: T) -> bool:
        """True for an open object that was not forgotten."""
        return thing in self._open

    def _forget(self) -> None:
        for thing in list(self._open):
            thing.forget()
        self._open.clear()


_is_forked: Final[trio.lowlevel.RunVar[bool]] = trio.lowlevel.RunVar("trimesh_is_forked", default=False)
_threads_of_parent: set[int] = set()


def forked_here() -> None:
    """Arrange, in a child forked from a process with meshes, that it ends before it continues the parent's tasks."""
    signal.set_wakeup_fd(-1)  # a signal here must not wake the parent's Trio run
    if trio.lowlevel.in_trio_task():
        _is_forked.set(True)
        trio.lowlevel.add_instrument(_EndOfStep())


def _note_thread() -> None:
    if not trio.lowlevel.in_trio_task():
        _threads_of_parent.clear()  # of the parent's own parent
        _threads_of_parent.add(threading.get_ident())


os.register_at_fork(after_in_child=_note_thread)


def is_thread_of_parent() -> bool:
    """Return whether the running thread forked this process: a Trio run that has started it is the parent's."""
    return threading.get_ident() in _threads_of_parent


def is_forked_run() -> bool:
    """Return whether the running Trio run is a fork's copy: its task must not continue in the runtime."""
    return trio.lowlevel.in_trio_run() and _is_forked.get()


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child as the interpreter ends: with the code of a `SystemExit`, or a traceback."""
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code == 1 and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        elif error is not None:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a stream that was closed
                stream.flush()
    finally:
        os._exit(code & 0xFF)


class _EndOfStep(trio.abc.Instrument):
    """Ends the child before another task of the copied run continues in it."""

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        end_child(None)


# ---- `breakpoint()` in a process without a terminal ------------------------------------------------------------------


def refuse_breakpoints(setting: str) -> None:
    """Make `breakpoint()` raise an error with advice: pdb would read an end of file and raise `BdbQuit`.

    A debugger set by `PYTHONBREAKPOINT` or the program stays.

    Args:
        setting: Name of the setting that turns debugging off.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise RuntimeError(
            f"breakpoint() in a process of a mesh waits for `trimesh debug`, which TRIMESH_{setting.upper()}=off rules "
            "out: leave that setting out; or spawn the actor on this_proc(), or run it under "
            "@trimesh.testing.simulate, where it is in your process"
        )

    if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse


# ---- resource tracker of `multiprocessing`, which outlives the processes that it cleans up after ---------------------

# The first user of shared memory or of a semaphore starts it. It reads their names from a pipe, and unlinks the
# remaining ones when the last process that can write to the pipe is gone. All processes that a worker has started are
# killed with it, by its group, its session or its mark. The tracker carries none of these, so that it ends by itself,
# moments later. Its own mark identifies it to the spawner, which waits briefly for it when the family ends.

TRACKER_MARK: Final = "TRIMESH_TRACKER"
"""Environment variable of a resource tracker, in place of `linux.MARKER`."""

_MODULE: Final = "multiprocessing.resource_tracker"


def keep_trackers() -> None:
    """Make resource trackers started by this process, and by its forks, outlive their users."""
    when_imported(_MODULE, _keep)


def release_tracker() -> None:
    """Release the tracker that this process uses, if any: it ends when all other users have ended, too."""
    module: Any = sys.modules.get(_MODULE)
    tracker: Any = getattr(module, "_resource_tracker", None)
    fd = getattr(tracker, "_fd", None)
    if isinstance(fd, int):
        os.close(fd)
        tracker._fd = None  # noqa: SLF001 - it has no method that does not wait


def _keep(module: ModuleType) -> None:
    tracker: Any = module
    tracker.util = _Starting(tracker.util)


class _Starting:
    """Replacement of `multiprocessing.util` in the tracker's module, which starts the process through it."""

    def __init__(self, util: Any) -> None:
        self._util = util

    def __getattr__(self, name: str) -> Any:
        return getattr(self._util, name)

    def spawnv_passfds(self, path: str | bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        """Start a tracker, in a session of its own; return its pid."""
        env = {name: value for name, value in os.environ.items() if name != linux.MARKER}
        env[TRACKER_MARK] = "1"
        process = subprocess.Popen(  # noqa: S603 - what multiprocessing starts
            args, executable=path, pass_fds=passfds, env=env, restore_signals=False, start_new_session=True
        )
        process.returncode = 0  # multiprocessing waits for it by its pid, or nothing does
        return process.pid


# ---- `multiprocessing` in a worker: classes and functions of the user's script ---------------------------------------

# A worker received them by value: its `__main__` has no file that a process started by `spawn` or `forkserver` could
# run again, as in plain Python. So they go by value to those processes, too: as their name, and a pickle in case the
# name is unknown there. The receiver puts them on its `__main__`, so that its pickles refer to them by name.


def carry_script() -> None:
    """Make `multiprocessing` pickles of this process, and of its forks, carry the user's script."""
    when_imported("multiprocessing.reduction", _carry)


def _carry(module: ModuleType) -> None:
    reduction: Any = module
    reduction.ForkingPickler.reducer_override = _reduce


def _reduce(_: object, thing: Any) -> Any:
    if isinstance(thing, (FunctionType, type)) and thing.__module__ in MAIN_NAMES:
        return make, (thing.__qualname__, _cloudpickle().dumps(thing))
    return NotImplemented


def make(name: str, data: bytes) -> Any:
    """Return a class or function of the script: from this process's `__main__`, or made from a pickle.

    Called where the pickle is loaded: in a child of a worker, forked or not, or in the worker itself.
    """
    main = sys.modules["__main__"]
    found: Any = find(main, name)
    if found is None:
        found = _cloudpickle().loads(data)
        _place(main, found)
        attributes: dict[str, Any] = found.__dict__
        for one in (found, *attributes.values()):
            if isinstance(one, FunctionType):
                for used in one.__globals__.values():
                    _place(main, used)
    return found


def _cloudpickle() -> Any:
    import cloudpickle  # noqa: PLC0415 - needed by few workers

    return cloudpickle


def _place(main: ModuleType, thing: Any) -> None:
    if isinstance(thing, (FunctionType, type)) and thing.__module__ in MAIN_NAMES and thing.__qualname__.isidentifier():
        main.__dict__.setdefault(thing.__qualname__, thing)
