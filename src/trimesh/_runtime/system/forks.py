"""Forked children of the user's: what is not to be open in one, and where one ends that returns into our code.

A child that code of an actor has forked is no second worker. It may do what it likes by itself, meshes of its own
included, but it ends where the step of the task that has forked it ends, or the function that a thread runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from typing import Final, Generic, NoReturn, Protocol, TypeVar

import trio


class Forgettable(Protocol):
    """Something of this process alone."""

    def forget(self) -> None:
        """In a forked child: close the copies of descriptors, at once and without a word to other processes."""


T = TypeVar("T", bound=Forgettable)


class ForgottenInChildren(Generic[T]):
    """Objects of one kind that are open; a forked child forgets them. One that is lost is not kept."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[T] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def add(self, thing: T) -> None:
        """Note one that is open."""
        self._open.add(thing)

    def discard(self, thing: T) -> None:
        """Note one that is closed. Idempotent."""
        self._open.discard(thing)

    def __contains__(self, thing: T) -> bool:
        """Whether one is open, and was not forgotten."""
        return thing in self._open

    def _forget(self) -> None:
        for thing in list(self._open):
            thing.forget()
        self._open.clear()


_is_forked: Final[trio.lowlevel.RunVar[bool]] = trio.lowlevel.RunVar("trimesh_is_forked", default=False)
_threads_of_parent: set[int] = set()


def forked_here() -> None:
    """In a child that was forked from a process with meshes: let it end where it would go on as its parent."""
    signal.set_wakeup_fd(-1)  # a signal here must not wake the Trio run there
    if trio.lowlevel.in_trio_task():
        _is_forked.set(True)
        trio.lowlevel.add_instrument(_EndOfStep())
    else:
        _threads_of_parent.clear()  # of its own parent
        _threads_of_parent.add(threading.get_ident())


def is_thread_of_parent() -> bool:
    """Return whether the running thread was started by the Trio run of the process that this one was forked from."""
    return threading.get_ident() in _threads_of_parent


def is_forked_run() -> bool:
    """Return whether the running Trio run is the copy that a fork has made: its task must not go on in our code."""
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
    """Ends the child before another task of the copied run goes on in it."""

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        end_child(None)
