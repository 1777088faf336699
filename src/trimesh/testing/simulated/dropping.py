"""End the tasks of a simulated process as SIGKILL would: none of their code runs any more, not even clean-up.

Trio can cancel a task and Python can close a coroutine; both run its `finally`. What a killed process does not do must
not be done here either, so two private places are used, which are tried out at first use:

    Trio       resumes a task by `task.coro.send`: a task that is dropped has a coroutine that has ended already, and so
               leaves its nursery in the next tick
    CPython    throws GeneratorExit into a suspended coroutine or generator when its last reference goes, but only if it
               is not marked as finalized: those of the dropped tasks are, and their frames are freed as they are

What is freed with the frames still has its destructors (`__del__`). Where an interpreter has no such mark, tasks are
cancelled, and a warning says so.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import types
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Final, NoReturn

import trio

from trimesh._runtime.life.proc import Proc
from trimesh._transport.interface.base import Link, Transport

SUSPENDED: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)

_NOT_THROUGH: Final = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    type,
    trio.lowlevel.Task,
    trio.Nursery,
    trio.CancelScope,
    Link,
    Proc,
    Transport,
)
"""Where the search for what a process has suspended ends: behind these is what other processes have, too."""

_GC_HEADER_BYTES: Final = 2 * ctypes.sizeof(ctypes.c_void_p)
_FINALIZED: Final = 1
"""Bit of the second word of the header that the collector keeps before an object (`_PyGC_PREV_MASK_FINALIZED`)."""


class CleanupRunsWarning(UserWarning):
    """This interpreter cannot free a coroutine as it is: simulated kills run the clean-up of their victims."""


class _Ended:
    """Stands for the coroutine of a task that has ended."""

    cr_frame = cr_await = None
    cr_running = False

    def send(self, _: object) -> NoReturn:
        raise StopIteration

    throw = send


_ENDED: Final = _Ended()


def drop_tasks(root: trio.lowlevel.Task, also: Iterable[object] = ()) -> bool:
    """End a task and all below it in the next tick; none of them is resumed.

    A task that calls this for a tree that it is part of goes on until it waits. Its scope must be cancelled then.

    Args:
        root: The task.
        also: Further objects of the same process, which may have suspended generators.

    Returns:
        Whether that was possible; if not, nothing was done.
    """
    if not can_drop():
        return False
    core: Any = trio._core  # noqa: SLF001 - see above
    runner: Any = core._run.GLOBAL_RUN_CONTEXT.runner  # noqa: SLF001 - the same
    coroutines: list[object] = []
    for task in list(_tree(root)):
        coroutines.append(task.coro)
        _end(runner, task)
    for thing in _suspended(*coroutines, *also):
        _mark_finalized(thing)
        if isinstance(thing, types.AsyncGeneratorType):
            runner.asyncgens.alive.discard(thing)  # they are closed at the end of the run otherwise
    return True


@functools.cache
def can_drop() -> bool:
    """Tell whether coroutines can be freed as they are; tried out at first use.

    Warns:
        CleanupRunsWarning: They cannot.
    """
    closed: list[int] = []

    def suspended() -> Generator[None, None, None]:
        try:
            yield
        finally:
            closed.append(1)

    made = suspended()
    next(made)
    if sys.implementation.name == "cpython" and sys.getsizeof(made) - made.__sizeof__() == _GC_HEADER_BYTES:
        _mark_finalized(made)
    del made
    if not closed:
        return True
    text = "this interpreter cannot free a suspended coroutine: simulated kills run the clean-up of their victims"
    warnings.warn(text, CleanupRunsWarning, stacklevel=2)
    return False


def _tree(root: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield root
    for nursery in root.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tree(child)


def _end(runner: Any, task: Any) -> None:
    """Let a task end at its next step, and see to it that it has one."""
    is_parent = False
    for nursery in task._child_nurseries:  # noqa: SLF001 - see the head of this file
        is_parent = is_parent or nursery._parent_waiting_in_aexit  # noqa: SLF001
        nursery._parent_waiting_in_aexit = False  # noqa: SLF001 - no task is woken when the last child has ended
    task._child_nurseries = []  # noqa: SLF001
    is_running, task.coro = task.coro.cr_running, _ENDED
    if is_running:
        return
    if task._next_send_fn is not None:  # noqa: SLF001 - it is about to run
        task._next_send_fn = _ENDED.send  # noqa: SLF001
        return
    abort, task._abort_func = task._abort_func, None  # noqa: SLF001
    if is_parent or (abort is not None and abort(_raise_killed) is trio.lowlevel.Abort.SUCCEEDED):
        runner.reschedule(task)
    # What cannot be aborted, a thread of the system, reschedules the task itself when it is over.


def _raise_killed() -> NoReturn:
    raise ProcessLookupError("the simulated process was killed")


def _suspended(*roots: object) -> Iterator[object]:
    """Yield the coroutines and generators that can be reached from some objects of one process."""
    seen: set[int] = set()
    ends: dict[type, bool] = {}  # a question to an abstract class is slow, and of thousands of objects few types differ
    found = list(roots)
    while found:
        thing = found.pop()
        if id(thing) in seen or not gc.is_tracked(thing):
            continue
        kind = type(thing)
        if (is_end := ends.get(kind)) is None:
            is_end = ends[kind] = issubclass(kind, _NOT_THROUGH)
        if is_end:
            continue
        seen.add(id(thing))
        if kind in SUSPENDED:
            yield thing
        found += gc.get_referents(thing)


def _mark_finalized(thing: object) -> None:
    word = ctypes.c_size_t.from_address(id(thing) - _GC_HEADER_BYTES // 2)
    word.value |= _FINALIZED
