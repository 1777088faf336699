"""What the actors of a process do, in words: which calls run, in which tasks, awaiting what; which wait behind them.

It is written by the process itself, from a signal handler of its main thread, so that it needs no turn of its loop: it
takes no lock, awaits nothing, reads no file, and changes nothing.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh._runtime.tasks.coroutines import await_chain, find_outside_tasks, outside_tasks_in
from trimesh._wire.exceptions.tracebacks import OURS, package_of, program_frame, shown_frames
from trimesh.errors import place_name
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall

FRAMES_MAX: Final = 16
"""Frames shown of one task or thread, innermost first."""

_TRIO_CORE: Final = os.path.join(os.path.dirname(trio.__file__), "_core", "")
_Place = tuple[str, int, str, str]
"""File, line and function of a frame, and the package of its module."""

_IDLE_THREAD: Final = os.path.join(_TRIO_CORE, "_thread_cache.py")


_WAITING: Final = {
    "trio": ("get_events",),
    OURS: ("_select", "before_io_wait"),
    "asyncio": ("_run_once",),
    "uvloop": ("noop",),
}
"""Functions in which a loop waits, by package: of Trio, and of asyncio where its loop drives the Trio run."""


def describe_actors(proc: Proc) -> Iterator[str]:
    """Yield lines on the actors of a process that have something to do: calls, and tasks of their own."""
    for mesh, cell in list(proc.cells.items()):
        if mesh != AGENT:
            yield from _describe_cell(cell, trio.current_time())


def describe_threads() -> Iterator[str]:
    """Yield lines on the threads of this process, but for the main one and those that wait for work."""
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - what faulthandler shows, to Python
        if ident == threading.main_thread().ident or frame.f_code.co_filename == _IDLE_THREAD:
            continue
        yield "a thread:"
        yield from _lines(_thread_places(frame))


def is_in_loop(frame: FrameType | None) -> bool:
    """Return whether a main thread that was interrupted in `frame` waits in its loop: it is free for any task."""
    while frame is not None and _package_of(frame) == "selectors":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _WAITING.get(_package_of(frame), ())


def where(task: trio.lowlevel.Task, thread: int = 0) -> tuple[str, list[str]]:
    """Return where a task is, `file:line in function`, and all that leads there, innermost first.

    Frames of the runtime, and of what it has called, are left out. The place is that of the program where it has one.

    Args:
        thread: The thread in which it runs its endpoint; 0 for none.
    """
    frame = sys._current_frames().get(thread) if thread else None  # noqa: SLF001 - what faulthandler shows, to Python
    places = _shown(_await_places(task.coro) if frame is None else _thread_places(frame))
    at = program_frame(places, _package)
    return "" if at is None else _text(at), [_text(place) for place in places[:FRAMES_MAX]]


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return the stack of a thread that is at `frame`, innermost first, as `faulthandler` writes one."""
    return [
        f'  File "{one.f_code.co_filename}", line {one.f_lineno} in {one.f_code.co_name}' for one in _outwards(frame)
    ]


def _describe_cell(cell: Cell, now: float) -> Iterator[str]:
    name = place_name(cell.spec.name, cell.spec.point)
    calls: dict[trio.lowlevel.Task, IncomingCall] = {}
    for group in cell.mailbox.groups():
        calls |= {task: call for call, task in group.running.items()}
    for task, call in calls.items():
        yield f"{name}.{call.spec.name} runs{_ages(call, now)}"
        yield from _describe_task(task)
    for group in cell.mailbox.groups():
        behind = ", ".join(dict.fromkeys(call.spec.name for call in group.running))
        for call in group.queue:
            yield f"{name}.{call.spec.name} is queued behind {behind or 'nothing'}{_ages(call, now)}"
    if not cell.mailbox.is_open:
        for call in cell.mailbox.queued():
            yield f"{name}.{call.spec.name} is queued until the actor serves{_ages(call, now)}"
    if cell.task is not None:
        yield from _describe_own(name, cell.task, calls)
        yield from _describe_outside(name, cell.task, calls)


def _describe_own(name: str, task: trio.lowlevel.Task, calls: dict[trio.lowlevel.Task, IncomingCall]) -> Iterator[str]:
    """Yield lines on set-up, clean-up and background tasks: what is no call, and not the waiting of our own."""
    lines = [*_lines(_await_places(task.coro))]
    if lines and not _is_ours(task):
        yield f"{name} in a task of its own, {task.name.rpartition('.')[2]}:"
        yield from lines
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            if child not in calls:
                yield from _describe_own(name, child, calls)


def _describe_outside(name: str, task: trio.lowlevel.Task, calls: Iterable[trio.lowlevel.Task]) -> Iterator[str]:
    """Yield lines on tasks of another loop that an actor has started, and no call waits for."""
    outside = find_outside_tasks()
    if outside is None:
        return
    told = {one for waiting in (task, *calls) for one in outside_tasks_in(waiting)}
    for one in outside.of_actor(task.context):
        if one not in told and (lines := [*_lines(_await_places(one))]):
            yield f"{name} in a task of its own, {one.get_name()}:"
            yield from lines


def _is_ours(task: trio.lowlevel.Task) -> bool:
    return all(_package(place) in (OURS, "trio") for place in _await_places(task.coro))


def _describe_task(task: trio.lowlevel.Task, depth: int = 1) -> Iterator[str]:
    yield from _lines(_await_places(task.coro), depth)
    for other in outside_tasks_in(task)[1:]:
        yield from _under(f"{'  ' * depth}its task {other.get_name()}:", _lines(_await_places(other), depth + 1))
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            head = f"{'  ' * depth}its task {child.name.rpartition('.')[2]}:"
            yield from _under(head, _describe_task(child, depth + 1))


def _under(head: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines under a head; nothing for a task that has only code of the runtime: it waits for the program."""
    found = list(lines)
    if found:
        yield head
        yield from found


def _ages(call: IncomingCall, now: float) -> str:
    text = f", {now - call.received_at:.1f} s old"
    if call.cancelled_at <= now:
        return f"{text}, cancelled {now - call.cancelled_at:.1f} s ago"
    return text if call.deadline == math.inf else f"{text}, {call.deadline - now:.1f} s of budget left"


# ---- frames ----------------------------------------------------------------------------------------------------------


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _lines(places: Sequence[_Place], depth: int = 1) -> Iterator[str]:
    """Yield a line for each frame, innermost first, without those of the runtime and of what it has called."""
    shown = _shown(places)
    for file, line, name, _ in shown[:FRAMES_MAX]:
        yield f'{"  " * depth}File "{file}", line {line} in {name}'
    if len(shown) > FRAMES_MAX:
        yield f"{'  ' * depth}and {len(shown) - FRAMES_MAX} frames more"


def _shown(places: Sequence[_Place]) -> list[_Place]:
    kept = shown_frames(reversed(places), _package, is_inside=True)
    kept = kept[::-1] or [place for place in places if _package(place) != OURS]  # a task may be a function of Trio's
    return [place for place in kept if not place[0].startswith((_TRIO_CORE, "<frozen importlib"))]


def _package(place: _Place) -> str:
    return place[3]


def _text(place: _Place) -> str:
    file, line, name, _ = place
    return f"{file}:{line} in {name}"


def _package_of(frame: FrameType) -> str:
    return package_of(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> _Place:
    code = frame.f_code
    return code.co_filename, frame.f_lineno, code.co_name, _package_of(frame)


def _thread_places(frame: FrameType | None) -> list[_Place]:
    return [_place(one) for one in _outwards(frame)]


def _await_places(coroutine: Any) -> list[_Place]:
    """Return where a coroutine is, and what it awaits, innermost first; see `await_chain`."""
    return [_place(frame) for frame, _ in await_chain(coroutine) if frame is not None][::-1]
