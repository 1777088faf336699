"""Threads of simulated actors: a function runs inline after a seeded delay, and sleeps in virtual time (rule S1).

A real thread would run in real time. So `trio.to_thread.run_sync` of an actor, and Trio's own uses of it (files,
paths), call the function in Trio's thread, and so does an endpoint with `thread=True`. Time that the function sleeps by
`time.sleep` passes after it has returned: until then its caller waits.

Kill of a simulated process: its tasks end as by SIGKILL. None of their code runs any more, not even clean-up.

Cancelling a task and closing a coroutine both run its `finally`, which a killed process does not. So two private
mechanisms are used, which are tested at first use:

    Trio       resumes a task by `task.coro.send`: a dropped task gets a coroutine that has ended already, and so leaves
               its nursery in the next tick
    CPython    throws GeneratorExit into a suspended coroutine or generator when its last reference goes, unless it is
               marked as finalized: those of dropped tasks are, so their frames are freed without running

Objects freed with the frames still run their destructors (`__del__`). If an interpreter has no such mark, tasks are
cancelled, with a warning.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import io
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Final, NoReturn, TypeVar

import attrs
import trio

from trimesh._runtime.life.current import find_proc_anywhere
from trimesh._runtime.life.proc import Proc
from trimesh._transport.interface import Link, Transport
from trimesh.ids import ProcId
from trimesh.testing.plans.disk_faults import FaultyDisk
from trimesh.testing.simulated.guards import Change, is_in_actor
from trimesh.testing.simulated.time import SimTime

T = TypeVar("T")

THREAD_SECONDS: Final = 0.01
"""Longest delay of the start of a thread."""


@attrs.define(eq=False)
class SimThreads:
    """The threads of one simulated run.

    Attributes:
        draw: Random numbers of the delays.
        time: The clocks that code in a thread reads.
    """

    draw: random.Random
    time: SimTime

    async def run(self, function: Callable[[], T], *, is_left: bool = False) -> T:
        """Run a function as a thread would.

        Args:
            function: Function to run.
            is_left: Whether a cancelled caller abandons the thread.
        """
        await trio.sleep(self.draw.uniform(0, THREAD_SECONDS))
        before, self.time.in_thread = self.time.in_thread, 0.0
        try:
            result = function()
        finally:
            slept, self.time.in_thread = self.time.in_thread, before
        if slept:
            with trio.CancelScope(shield=not is_left):
                await trio.sleep(slept)
        return result

    def changes(self) -> list[Change]:
        """Return the patches by which functions that actors pass to `trio.to_thread` run in this way."""
        real, back, back_sync = trio.to_thread.run_sync, trio.from_thread.run, trio.from_thread.run_sync
        check = trio.from_thread.check_cancelled

        async def run_sync(
            function: Callable[..., Any],
            *args: Any,
            abandon_on_cancel: bool = False,
            limiter: trio.CapacityLimiter | None = None,
            **options: Any,
        ) -> Any:
            if not is_in_actor():
                return await real(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter, **options)
            slot: AbstractAsyncContextManager[Any] = nullcontext() if limiter is None else limiter
            async with slot:
                return await self.run(lambda: function(*args), is_left=abandon_on_cancel)

        def run_back(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self.time.in_thread is None:
                return back(function, *args, **options)
            raise RuntimeError(
                "code in a thread of a simulated actor must not wait for Trio, in whose thread it runs, got "
                "trio.from_thread.run: return to the endpoint and await there, or test it over real processes, "
                '`@pytest.mark.mesh_backend("proc")`'
            )

        def run_back_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return back_sync(function, *args, **options) if self.time.in_thread is None else function(*args)

        def check_cancelled() -> None:
            if self.time.in_thread is None:  # no cancel can arrive while inline code runs
                check()

        path: Any = trio._path  # noqa: SLF001 - it has imported the function by name
        return [
            (trio.to_thread, "run_sync", run_sync),
            (path, "run_sync", run_sync),
            (trio.from_thread, "run", run_back),
            (trio.from_thread, "run_sync", run_back_sync),
            (trio.from_thread, "check_cancelled", check_cancelled),
        ]


# ---- descriptors of simulated processes: they end with their process, as the system ends those of a real one ---------

# All simulated processes share the descriptors of one process of the machine. Descriptors that an actor opens are
# recorded with its process. When that is killed, each is replaced at once by a descriptor of an empty file: locks are
# released, and the buffer of a file object is lost. Then the file object is closed. A number without one is closed when
# the run ends, because an object that is freed until then may close it.

_NUMBERS: Final = ("open", "dup", "pipe", "pipe2", "memfd_create", "eventfd", "openpty", "pidfd_open")
"""Functions of `os` that return one or two new descriptors."""

Identity = tuple[int, int]
"""File of a descriptor: device and inode."""


@attrs.define(eq=False)
class _Opened:
    """A descriptor.

    Attributes:
        owner: The process that opened it.
        identity: Its file; if another file has the number now, this descriptor was closed.
        file: The file object that closes it; None if there is none.
    """

    owner: ProcId
    identity: Identity
    file: weakref.ref[Any] | None


@attrs.define(eq=False)
class SimFiles:
    """Descriptors that the actors of one run opened, on a disk that may be faulty."""

    _disk: FaultyDisk
    _opened: dict[int, _Opened] = attrs.field(factory=dict[int, _Opened])
    _nothing: int | None = None

    def ended(self, owner: ProcId, *, is_killed: bool) -> None:
        """Close the descriptors of an ended process.

        Args:
            owner: The process.
            is_killed: Whether it was killed; if not, its file objects close themselves.
        """
        for number, opened in list(self._opened.items()):
            if opened.owner != owner or (opened.file is not None and not is_killed):
                continue
            if _identity(number) == opened.identity:
                nothing = self._of_nothing()
                os.dup2(nothing, number, inheritable=False)
                opened.identity = _identity(nothing) or opened.identity
                file = None if opened.file is None else opened.file()
                if file is not None:
                    with suppress(OSError, ValueError):  # an interrupted operation may fail
                        file.close()
            else:
                del self._opened[number]

    def _of_nothing(self) -> int:
        if self._nothing is None:
            self._nothing = os.memfd_create("ended", os.MFD_CLOEXEC)
        return self._nothing

    def _note(self, number: int, file: Any = None) -> None:
        identity = _identity(number)
        proc = find_proc_anywhere() if is_in_actor() else None
        if proc is None or identity is None:
            self._opened.pop(number, None)  # the number was that of a closed descriptor
        else:
            self._opened[number] = _Opened(proc.proc_id, identity, None if file is None else weakref.ref(file))

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `open` that records the descriptor of each file object."""

        def open_noted(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            with suppress(OSError):
                self._note(made.fileno(), made if kwargs.get("closefd", True) else None)
            return made

        return open_noted

    def _numbering(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `os` that records the descriptors that it returns."""

        def open_noted(*args: Any, **kwargs: Any) -> Any:
            made: Any = real(*args, **kwargs)
            numbers: tuple[int, ...] = (made,) if isinstance(made, int) else made
            for number in numbers:
                self._note(number)
            return made

        return open_noted

    def changes(self) -> list[Change]:
        """Return the patches that record descriptors opened by actors, and ask the disk."""
        names = [name for name in _NUMBERS if hasattr(os, name)]
        asking = {(owner, name): value for owner, name, value in self._disk.changes()}
        opening = self._opening(asking[io, "open"])
        noting = {(os, name): self._numbering(asking.get((os, name), getattr(os, name))) for name in names}
        made = {**asking, **noting, (builtins, "open"): opening, (io, "open"): opening}
        return [(owner, name, value) for (owner, name), value in made.items()]

    def close(self) -> None:
        """Close the replaced descriptors that no file object closes; called when the run ends."""
        nothing = None if self._nothing is None else _identity(self._nothing)
        for number, opened in self._opened.items():
            if opened.file is None and opened.identity == nothing == _identity(number):
                os.close(number)
        if self._nothing is not None:
            os.close(self._nothing)


def _identity(number: int) -> Identity | None:
    """Return the file of a descriptor, or None when it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# ---- end of tasks as by SIGKILL: none of their code runs any more, not even clean-up ---------------------------------

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
"""Types at which the search for suspended coroutines ends: they refer to objects of other processes, too."""

_GC_HEADER_BYTES: Final = 2 * ctypes.sizeof(ctypes.c_void_p)
_FINALIZED: Final = 1
"""Bit of the second word of the header that the collector keeps before an object (`_PyGC_PREV_MASK_FINALIZED`)."""


class CleanupRunsWarning(UserWarning):
    """This interpreter cannot free a suspended coroutine: simulated kills run the clean-up of their victims."""


class _Ended:
    """Replacement for the coroutine of a dropped task."""

    cr_frame = cr_await = None
    cr_running = False

    def send(self, _: object) -> NoReturn:
        raise StopIteration

    throw = send


_ENDED: Final = _Ended()


def drop_tasks(root: trio.lowlevel.Task, also: Iterable[object] = ()) -> bool:
    """End a task and all below it in the next tick; none of them is resumed.

    A task that calls this for its own tree continues until it waits; the caller must then cancel its scope.

    Args:
        root: The task.
        also: Further objects of the same process, which may hold suspended generators.

    Returns:
        False if that is impossible here; then nothing was done.
    """
    if not can_drop():
        return False
    core: Any = trio._core  # noqa: SLF001 - see above
    runner: Any = core._run.GLOBAL_RUN_CONTEXT.runner  # noqa: SLF001 - the same
    coroutines: list[object] = []
    nurseries: list[trio.Nursery] = []
    tasks = list(_tree(root))
    while tasks:
        nurseries += [nursery for task in tasks for nursery in task.child_nurseries]
        for task in tasks:
            coroutines.append(task.coro)
            _end(runner, task)
        # An abort may have started a task.
        tasks = [task for nursery in nurseries for task in nursery.child_tasks if not isinstance(task.coro, _Ended)]
    for thing in _suspended(*coroutines, *also):
        _mark_finalized(thing)
        if isinstance(thing, types.AsyncGeneratorType):
            runner.asyncgens.alive.discard(thing)  # Trio would close it at the end of the run
    return True


@functools.cache
def can_drop() -> bool:
    """Return whether suspended coroutines can be freed without running; the first use tries it.

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
    """Make a task end at its next step, and schedule that step."""
    is_parent = False
    for nursery in task._child_nurseries:  # noqa: SLF001 - see the head of this file
        is_parent = is_parent or nursery._parent_waiting_in_aexit  # noqa: SLF001
        nursery._parent_waiting_in_aexit = False  # noqa: SLF001 - no task is woken when the last child has ended
    task._child_nurseries = []  # noqa: SLF001
    is_in_thread = any(frame.f_globals.get("__name__") == "trio._threads" for frame, _ in task.iter_await_frames())
    is_running, task.coro = task.coro.cr_running, _ENDED
    if is_running:
        return
    if task._next_send_fn is not None:  # noqa: SLF001 - the task is scheduled already
        task._next_send_fn = _ENDED.send  # noqa: SLF001
        return
    abort, task._abort_func = task._abort_func, None  # noqa: SLF001
    # A task that waits for its children would keep the error, whose frames hold what the caller has.
    is_aborted = not is_parent and abort is not None and abort(_raise_killed) is trio.lowlevel.Abort.SUCCEEDED
    if is_in_thread and not is_aborted:
        return  # the thread reschedules the task when it is over
    if task._next_send_fn is None:  # noqa: SLF001 - else the abort has scheduled it
        runner.reschedule(task)


def _raise_killed() -> NoReturn:
    raise ProcessLookupError("the simulated process was killed")


def _suspended(*roots: object) -> Iterator[object]:
    """Yield the coroutines and generators that can be reached from some objects of one process."""
    seen: set[int] = set()
    ends: dict[type, bool] = {}  # `issubclass` of an abstract class is slow, and thousands of objects have few types
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
