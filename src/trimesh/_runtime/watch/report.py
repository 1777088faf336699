"""Reports of a process's waits, as text: for the log of a block that does not end (M4), and for `trimesh.dump`.

FD-1 Processes are the same if they differ only in ages, in the pid, and in the place of process or actor in its mesh.
FD-2 The first of them is described whole; the others are named after it.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

import trio

from trimesh._routing.collector import RankState
from trimesh._runtime.system.exits import process_state
from trimesh._runtime.tasks.coroutines import await_chain, find_outside_tasks, outside_tasks_in
from trimesh._runtime.watch.stacks import TASKS_SECONDS, Report, read_report, request_report
from trimesh._wire.exceptions.tracebacks import OURS, package_of, program_frame, shown_frames
from trimesh.errors import place_name
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.calls.outgoing import OutgoingCall
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.peers.deaths import AbandonedCall
    from trimesh._runtime.peers.incoming import IncomingCall


_POLL_SECONDS: Final = 0.005
"""Polling interval for reports of queried processes."""

_Cut = Callable[[Iterable[str]], list[str]]
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait (D)",
    "Z": "ended",
    "": "gone",
}


def write_report(proc: Proc | None, out: TextIO) -> None:
    """Write what a process waits for, and what its actors and child processes do; None for no process yet.

    Blocking: no checkpoint; takes up to `TASKS_SECONDS` when there are child processes.
    """
    if proc is None:
        out.write("trimesh: no mesh is open in this process\n")
        return
    query = ReportQuery([member for member in proc.members.values() if not member.gone.is_set()])
    while not query.is_answered:
        time.sleep(_POLL_SECONDS)
    out.writelines(line + "\n" for line in _lines(proc, query))


class ReportQuery:
    """Query of child processes for their activity.

    Attributes:
        reports: Received reports, by process.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.reports: dict[Member, Report] = {}
        self._asked_at = {member: request_report(member.pid) for member in members if member.stack_fd >= 0}
        self._ends_at = time.monotonic() + TASKS_SECONDS
        self._members = members

    @property
    def members(self) -> Sequence[Member]:
        """Members that can be queried; simulated ones cannot."""
        return self._members

    @property
    def is_answered(self) -> bool:
        """True when all have answered, or their time is up; polls them now."""
        for member, asked_at in self._asked_at.items():
            found = self.reports.get(member)
            if found is None or found.tasks is None:
                self.reports[member] = read_report(member.pid, member.stack_fd, asked_at)
        is_complete = all(report.tasks is not None for report in self.reports.values())
        return is_complete or time.monotonic() >= self._ends_at


def _lines(proc: Proc, query: ReportQuery) -> Iterator[str]:
    yield f"trimesh: process {proc.pid} on {proc.host_name}"
    for block in proc.stopping_blocks:
        yield f"  block {block.name} is being left, {grace_left(block.deadline)}"
    yield from _describe_members(proc, query)
    for call in proc.unended_calls():
        yield from _describe_outgoing(proc, call)
    for peer in proc.peers():
        for abandoned in peer.abandoned:
            yield f"  {describe_abandoned(abandoned)}"
    for holding, one in proc.channels.blocked():
        home = proc.members.get(holding.home.proc_id)
        where = "" if home is None else f" of {home.label}"
        yield f"  send to channel {holding.channel}{where}: waits, {trio.current_time() - one.began_at:.1f} s old"
    for line in describe_actors(proc):
        yield f"  {line}"


def describe_abandoned(call: AbandonedCall) -> str:
    """Describe an abandoned call in one line."""
    now, where = trio.current_time(), call.where()
    member = "" if where.point is None else f" to {place_name(where.mesh, where.point)}"
    return (
        f"call {call.what}{member}: cancelled {now - call.cancelled_at:.1f} s ago and abandoned, may still run, "
        f"{now - call.started_at:.1f} s old"
    )


def describe_self(proc: Proc, frame: FrameType | None) -> tuple[bool, str]:
    """Describe this process to its owner; see `stacks.Describe`."""
    return is_in_loop(frame), "\n".join([*describe_actors(proc), *describe_threads()])


async def describe_waiting(proc: Proc, members: Sequence[Member]) -> Sequence[str]:
    """Return lines on those child processes that a block which is being left waits for."""
    waiting = [member for member in members if not member.gone.is_set() and _doing_of(proc, member)]
    query = ReportQuery(waiting)
    while not query.is_answered:  # noqa: ASYNC110 - another process answers, by a file
        await trio.sleep(_POLL_SECONDS)
    others = len(members) - len(waiting)
    from trimesh._runtime.watch.stacks import brief  # noqa: PLC0415 - most blocks end

    lines = _describe_members(proc, query, brief)
    if waiting and others:
        lines.append(f"  nothing is awaited from {others} other {'process' if others == 1 else 'processes'}")
    return lines


def _describe_members(proc: Proc, query: ReportQuery, cut: _Cut = list) -> list[str]:
    """Return lines on the queried members, each cut; equal ones are described once."""
    return fold(
        (member.label, member.pid, cut(_describe_member(proc, member, query.reports.get(member))))
        for member in query.members
    )


def _describe_member(proc: Proc, member: Member, report: Report | None) -> Iterator[str]:
    """Yield lines on one child process: state, requests of this process, activity."""
    state = _STATES.get(process_state(member.pid), "running")
    yield f"  {member.label} pid {member.pid}: {state}" + "".join(f", {one}" for one in _doing_of(proc, member))
    if report is None:
        return
    tasks = report.tasks
    for line in () if tasks is None else tasks.splitlines():
        yield f"    {line}"
    for line in () if report.is_in_loop else report.stack.splitlines():
        yield f"    {line}"


def _doing_of(proc: Proc, member: Member) -> list[str]:
    """Return the requests of this process to a child process; only the child knows whether a call runs there."""
    doing = [
        f"{_doing(call)} for {trio.current_time() - call.started_at:.1f} s"
        for call in proc.unended_calls()
        if call.is_open_at(member.peer)
    ]
    doing += [f"has not ended the abandoned call {call.what}" for call in member.peer.abandoned]
    if member.is_expected:
        doing.append("asked to exit")
    return doing


_OF_AGENT = {
    "setup": "in the setup function",
    "spawn": "in the start of an actor",
    "drain": "in accepted messages of {mesh}",
    "stop": "in the clean-up of {mesh}",
}


def _doing(call: OutgoingCall) -> str:
    mesh, _, endpoint = call.what.rpartition(".")
    if call.targets[0].mesh == AGENT and endpoint in _OF_AGENT:
        return _OF_AGENT[endpoint].format(mesh=mesh)
    return f"called {call.what}"


def grace_left(deadline: float | None) -> str:
    """Return text on the time left for clean-up."""
    if deadline is None:
        return "accepted messages still run"
    if deadline == math.inf:
        return "grace is infinite"
    return f"{max(0.0, deadline - trio.current_time()):.1f} s of grace left"


def _describe_outgoing(proc: Proc, call: OutgoingCall) -> Iterator[str]:
    age = trio.current_time() - call.started_at
    budget = "" if call.budget is None else f", budget {call.budget:.1f} s"
    states = call.collector.states()
    for index, state in enumerate(states):
        if state is not RankState.SETTLED:
            how = "queued here" if state is RankState.UNSENT else "sent"
            member = proc.members.get(call.targets[index].peer.proc_id)
            where = f"member {index}" if member is None else member.label
            yield f"  call {call.what} to {where}: {how}, {age:.1f} s old{budget}"


# ---- folding: equal descriptions of several processes become one -----------------------------------------------------

NAMED_MAX: Final = 4
"""Number of process names in one line; the rest is counted."""

# Compiled on first use.
_AGE: Final = r"\d+\.\d s\b"
_POINT: Final = r"\[[^\[\]{}\s,=]+=\d+(?:,[^\[\]{}\s,=]+=\d+)*\]"


def fold(reports: Iterable[tuple[str, int, Sequence[str]]]) -> list[str]:
    """Return the lines on some processes, equal texts once.

    Args:
        reports: Label, pid, and lines of each process.
    """
    alike = dict[str, tuple[Sequence[str], list[str]]]()
    for label, pid, lines in reports:
        text = re.sub(_POINT, "", "\n".join(lines).replace(f"pid {pid}:", "pid:", 1))
        alike.setdefault(re.sub(_AGE, "", text), (lines, []))[1].append(f"{label} pid {pid}")
    found = list[str]()
    for lines, (_, *others) in alike.values():
        found += lines
        if others:
            more = f" and {len(others) - NAMED_MAX} more" * (len(others) > NAMED_MAX)
            count = f"{len(others)} other process{'es' * (len(others) > 1)}"
            found.append(f"    and the same of {count}: {', '.join(others[:NAMED_MAX])}{more}")
    return found


# ---- task tree -------------------------------------------------------------------------------------------------------

# Activity of a process's actors, as text: running calls, their tasks, the awaited functions, and calls queued behind.
#
# The process writes it itself, in a signal handler of its main thread, so that its loop need not run: the handler takes
# no lock, awaits nothing, reads no file, and changes nothing.

FRAMES_MAX: Final = 16
"""Frames shown of one task or thread, innermost first."""

_TRIO_CORE: Final = os.path.join(os.path.dirname(trio.__file__), "_core", "")
_Place = tuple[str, int, str, str]
"""File, line and function of a frame, and the package of its module."""

_IDLE_THREAD: Final = os.path.join(_TRIO_CORE, "_thread_cache.py")


_LOOPS: Final = {
    "trio": ("get_events", "unrolled_run"),
    OURS: ("_select", "before_io_wait"),
    "asyncio": ("_run_once",),
    "uvloop": ("noop",),
}
"""Functions of loops that run no task, by package: of Trio, and of asyncio where its loop drives the Trio run."""


def describe_actors(proc: Proc) -> Iterator[str]:
    """Yield lines on the busy actors of a process: their calls, and their own tasks."""
    for mesh, cell in list(proc.cells.items()):
        if mesh != AGENT:
            yield from _describe_cell(cell, trio.current_time())


def describe_threads() -> Iterator[str]:
    """Yield lines on the threads of this process, except the main one and idle ones."""
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - what faulthandler shows, to Python
        if ident == threading.main_thread().ident or frame.f_code.co_filename == _IDLE_THREAD:
            continue
        yield "a thread:"
        yield from _place_lines(_thread_places(frame))


def is_in_loop(frame: FrameType | None) -> bool:
    """Return whether a main thread that was interrupted in `frame` is in its loop, free for any task."""
    for one in _outwards(frame):
        package = _package_of(one)
        if one.f_code.co_name in _LOOPS.get(package, ()):
            return True
        if package not in ("selectors", "trio"):
            return False
    return False


def where(task: trio.lowlevel.Task, thread: int = 0) -> tuple[str, list[str]]:
    """Return the place of a task, `file:line in function`, and all frames that lead there, innermost first.

    Frames of the runtime, and of its callees, are left out. The place is in the program if the task has such a frame.

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
    """Yield lines on set-up, clean-up and background tasks, but not on calls or waits of the runtime itself."""
    lines = [*_place_lines(_await_places(task.coro))]
    if lines and not _is_ours(task):
        yield f"{name} in a task of its own, {task.name.rpartition('.')[2]}:"
        yield from lines
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            if child not in calls:
                yield from _describe_own(name, child, calls)


def _describe_outside(name: str, task: trio.lowlevel.Task, calls: Iterable[trio.lowlevel.Task]) -> Iterator[str]:
    """Yield lines on tasks of another loop that an actor has started, and that no call waits for."""
    outside = find_outside_tasks()
    if outside is None:
        return
    told = {one for waiting in (task, *calls) for one in outside_tasks_in(waiting)}
    for one in outside.of_actor(task.context):
        if one not in told and (lines := [*_place_lines(_await_places(one))]):
            yield f"{name} in a task of its own, {one.get_name()}:"
            yield from lines


def _is_ours(task: trio.lowlevel.Task) -> bool:
    return all(_package(place) in (OURS, "trio") for place in _await_places(task.coro))


def _describe_task(task: trio.lowlevel.Task, depth: int = 1) -> Iterator[str]:
    yield from _place_lines(_await_places(task.coro), depth)
    for other in outside_tasks_in(task)[1:]:
        yield from _under(f"{'  ' * depth}its task {other.get_name()}:", _place_lines(_await_places(other), depth + 1))
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda one: one.name):
            head = f"{'  ' * depth}its task {child.name.rpartition('.')[2]}:"
            yield from _under(head, _describe_task(child, depth + 1))


def _under(head: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines under a head; nothing for a task with runtime code only, which waits for the program."""
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


def _place_lines(places: Sequence[_Place], depth: int = 1) -> Iterator[str]:
    """Yield a line for each frame, innermost first, without those of the runtime and of its callees."""
    shown = _shown(places)
    for file, line, name, _ in shown[:FRAMES_MAX]:
        yield f'{"  " * depth}File "{file}", line {line} in {name}'
    if len(shown) > FRAMES_MAX:
        yield f"{'  ' * depth}and {len(shown) - FRAMES_MAX} frames more"


def _shown(places: Sequence[_Place]) -> list[_Place]:
    kept = shown_frames(reversed(places), _package, is_inside=True)
    kept = kept[::-1] or [place for place in places if _package(place) != OURS]  # a task may run a function of Trio
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
    """Return the place of a coroutine, and of those that it awaits, innermost first; see `await_chain`."""
    return [_place(frame) for frame, _ in await_chain(coroutine) if frame is not None][::-1]
