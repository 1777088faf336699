"""What the actors of a process do, in words: which calls run, in which tasks, awaiting what; which wait behind them.

It is written by the process itself, from a signal handler of its main thread, so that it needs no turn of its loop: it
takes no lock, awaits nothing, reads no file, and changes nothing.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh._runtime.tasks import run_in_context as context_runner
from trimesh.ids import AGENT
from trimesh.shape.point import place_name

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.watch.process import WatchedProc

FRAMES_MAX: Final = 16
"""Frames shown of one task or thread, innermost first."""

_OWN: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TRIO: Final = os.path.dirname(trio.__file__) + os.sep
_HIDDEN: Final = (_OWN, os.path.join(_TRIO, "_core", ""))
_HIDING: Final = ("async_generator_asend", "async_generator_athrow")
"""Steps of an async generator, which do not say of which."""

_IDLE_THREAD: Final = os.path.join(_TRIO, "_core", "_thread_cache.py")


def describe_actors(proc: WatchedProc) -> Iterator[str]:
    """Yield lines on the actors of a process that have something to do: calls, and tasks of their own."""
    for mesh, cell in list(proc.cells.items()):
        if mesh != AGENT:
            yield from _describe_cell(cell, trio.current_time())


def describe_threads() -> Iterator[str]:
    """Yield lines on the threads of this process, but for the main one and those that wait for work."""
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - what faulthandler shows, to Python
        frames = [*_outwards(frame)]
        if ident == threading.main_thread().ident or frames[0].f_code.co_filename == _IDLE_THREAD:
            continue
        yield "a thread:"
        yield from _lines((one.f_code, one.f_lineno) for one in frames)


def is_in_loop(frame: FrameType | None) -> bool:
    """Return whether a main thread that was interrupted in `frame` waits in Trio's loop: it is free for any task."""
    return frame is not None and any(one.f_code.co_name == "get_events" for one in _outwards(frame))


def where(task: trio.lowlevel.Task) -> tuple[str, list[str]]:
    """Return where a task is, `file:line in function`, and all that leads there, innermost first.

    Frames of the runtime and of Trio's core are left out; where it is, is said without those of Trio.
    """
    frames = [one for one in _await_frames(task.coro) if not one[0].co_filename.startswith(_HIDDEN)][:FRAMES_MAX]
    lines = [f"{code.co_filename}:{line} in {code.co_name}" for code, line in frames]
    at = next((line for line in lines if not line.startswith(_TRIO)), lines[0] if lines else "")
    return at, lines


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


def _describe_own(name: str, task: trio.lowlevel.Task, calls: dict[trio.lowlevel.Task, IncomingCall]) -> Iterator[str]:
    """Yield lines on set-up, clean-up and background tasks: what is no call, and not the waiting of our own."""
    lines = [*_lines(_await_frames(task.coro))]
    if lines and not _is_ours(task):
        yield f"{name} in a task of its own, {task.name.rpartition('.')[2]}:"
        yield from lines
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            if child not in calls:
                yield from _describe_own(name, child, calls)


def _is_ours(task: trio.lowlevel.Task) -> bool:
    return all(code.co_filename.startswith((_OWN, _TRIO)) for code, _ in _await_frames(task.coro))


def _describe_task(task: trio.lowlevel.Task, depth: int = 1) -> Iterator[str]:
    yield from _lines(_await_frames(task.coro), depth)
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            yield f"{'  ' * depth}its task {child.name.rpartition('.')[2]}:"
            yield from _describe_task(child, depth + 1)


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


def _lines(frames: Any, depth: int = 1) -> Iterator[str]:
    """Yield a line for each frame, innermost first, without those of the runtime and of Trio's core."""
    shown = [(code, line) for code, line in frames if not code.co_filename.startswith(_HIDDEN)]
    for code, line in shown[:FRAMES_MAX]:
        yield f'{"  " * depth}File "{code.co_filename}", line {line} in {code.co_name}'
    if len(shown) > FRAMES_MAX:
        yield f"{'  ' * depth}and {len(shown) - FRAMES_MAX} frames more"


def _await_frames(coroutine: Any) -> list[tuple[CodeType, int]]:
    """Return where a coroutine is, and what it awaits, innermost first; also through what runs in another context."""
    found: list[tuple[CodeType, int]] = []
    while coroutine is not None:
        frame, coroutine = _step(coroutine)
        if frame is not None:
            found.append((frame.f_code, frame.f_lineno))
    return found[::-1]


def _step(coroutine: Any) -> tuple[FrameType | None, Any]:
    """Return the frame of something that is awaited, and what that awaits."""
    for frame_name, awaited_name in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
        if hasattr(coroutine, frame_name):
            frame: FrameType | None = getattr(coroutine, frame_name)
            awaited = getattr(coroutine, awaited_name)
            if awaited is None and frame is not None and frame.f_code is context_runner.REST_CODE:
                awaited = frame.f_locals.get("coroutine")
            return frame, awaited
    if type(coroutine).__name__ in _HIDING:
        return None, next((one for one in gc.get_referents(coroutine) if hasattr(one, "ag_frame")), None)
    return None, None
