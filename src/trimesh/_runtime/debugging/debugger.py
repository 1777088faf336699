"""What holds the threads of a worker: at `breakpoint()`, and at errors that leave an endpoint, if that is asked for.

DB-1 A thread that is held waits `seconds` for a terminal and goes on if none comes, or what it runs is cancelled.
DB-2 While the main thread is held no task runs in its process, and the clock of its Trio run stands still.
DB-3 A terminal that has gone lets the thread go on; so does the end of its run.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import find_cell
from trimesh._runtime.actors.context import execution_context
from trimesh._runtime.debugging.held_thread import HeldThread
from trimesh._runtime.system.breakpoints import refuse_breakpoints
from trimesh._runtime.tasks import place_outside
from trimesh._wire import observed
from trimesh.config import Settings
from trimesh.errors import Origin, leaves, origin, place_name
from trimesh.ids import AGENT
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_ENDING: Final = ("stop", "exit")
"""Endpoints of the agent: the actor, or the process, is to end."""


class Debugger:
    """Holds threads of a worker process.

    Args:
        proc: The process; made in its Trio run.
        seconds: For which a thread that is held waits for a terminal.

    Attributes:
        trio_thread: Ident of the main thread.
    """

    def __init__(self, proc: Proc, seconds: float) -> None:
        self.trio_thread = threading.get_ident()
        self._proc = proc
        self._seconds = seconds
        self._token = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()
        self._numbers = itertools.count(1)
        self._open: dict[int, HeldThread] = {}
        proc.holds.debugger = self

    def install(self) -> None:
        """Be what `breakpoint()` calls; a debugger that `PYTHONBREAKPOINT` names, or the program has set, stays."""
        if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = self.stop

    # ---- in the thread that is held --------------------------------------------------------------------------

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Hold the calling thread where it stands: what `breakpoint()` does."""
        del args, kwargs
        frame = sys._getframe(1)  # noqa: SLF001 - as pdb does
        known = next((one for one in self._open.values() if one.ident == threading.get_ident()), None)
        if known is not None and (known.is_stopped or known.prompt is None):
            return  # it was reached from the prompt of a terminal
        if known is not None and known.prompt is not None:  # it is stepped through, or has breakpoints
            known.prompt.set_trace(frame)
            return
        from trimesh._runtime.debugging.prompt import Prompt  # noqa: PLC0415 - pdb is loaded by its first use

        name = _here() or self._own_name()
        held = self._hold("breakpoint", name, (frame, frame.f_lineno), "")
        with held.standing():
            found = held.wait_for_terminal(self._seconds)
        if found:
            Prompt(held).set_trace(frame)
        else:
            held.end(f"{name} goes on: no debugger has come")

    def post_mortem(self, error: BaseException, where: Origin) -> None:
        """Hold the calling thread by an error that has left an endpoint of this process; not one from elsewhere."""
        traceback = _innermost(error.__traceback__)
        if traceback is None or any(origin(leaf) is not None for leaf in leaves(error)):
            return
        from trimesh._runtime.debugging.prompt import Prompt  # noqa: PLC0415 - as above

        name, found = _name_of(where.mesh, where.point, where.endpoint), False
        held = self._hold("post-mortem", name, (traceback.tb_frame, traceback.tb_lineno), _text_of(error))
        try:
            with held.standing():
                found = held.wait_for_terminal(self._seconds)
            if found:
                Prompt(held).look_at(error)
        finally:
            held.end("" if found else f"the error of {name} goes on: no debugger has come")

    def _hold(self, kind: str, name: str, place: tuple[FrameType, int], text: str) -> HeldThread:
        held = HeldThread(self, next(self._numbers), self._ending_of())
        self._open[held.number] = held
        frame, line = place
        row = observed.HoldRow(
            id=f"{self._proc.proc_id:x}.{held.number}",
            proc=f"{self._proc.proc_id:x}",
            proc_name=self._own_name(),
            name=name,
            kind=kind,
            at=f'File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}',
            text=text[: limits.OBSERVED_TEXT_CHARS],
            pid=self._proc.pid,
            host=self._proc.host_name,
            seconds=self._seconds,
        )
        self.tell(held, "held", msgspec.json.encode(row).decode())
        return held

    def _own_name(self) -> str:
        family, proc_id = self._proc.family, self._proc.proc_id
        own = None if family is None else family.own_mesh
        if own is None:
            return f"process {self._proc.pid}"
        rank = next(rank for rank, member in enumerate(own.members) if member.proc_id == proc_id)
        return _name_of(own.name, own.whole.point(rank), None)

    def _ending_of(self) -> Callable[[], bool]:
        """Return what tells whether the code that runs here is to end."""
        cell, call = find_cell(), None
        if cell is not None and threading.get_ident() == self.trio_thread:
            task: trio.lowlevel.Task | None
            if trio.lowlevel.in_trio_task():
                task = trio.lowlevel.current_task()
            else:  # a task of asyncio, whose loop drives Trio
                place = place_outside()
                task = None if place is None else place.keeper
            call = cell.mailbox.call_of(task)
        agent = self._proc.cells.get(AGENT)

        def is_ending() -> bool:
            if call is not None and call.cancelled_by is not None:
                return True
            asked = [] if agent is None else [*agent.mailbox.queued(), *agent.mailbox.running()]
            return any(one.spec.name in _ENDING for one in asked)

        return is_ending

    def pump(self, seconds: float) -> None:
        """Read links in the main thread, which is held."""
        self._proc.pump(seconds)

    def tell(self, held: HeldThread, kind: str, text: str) -> None:
        """Tell the controller what a thread says, in that thread."""
        self._in_trio(held.is_main, partial(self._proc.holds.tell, held.number, kind, text))
        if held.is_main:
            self._proc.pump(0)

    def stand(self, *, is_main: bool) -> Callable[[], None]:
        """Learn that a thread stands still; return what is to be called when it goes on."""
        pauses, begun = self._proc.holds.pauses, time.perf_counter()
        if not is_main:
            self._in_trio(False, partial(pauses.hold_here, 1))  # noqa: FBT003 - in which thread
            return partial(self._in_trio, False, partial(pauses.hold_here, -1))  # noqa: FBT003 - the same
        pauses.tell_held()

        def go_on() -> None:
            set_back(self._clock, time.perf_counter() - begun)
            pauses.tell_free()

        return go_on

    def ended(self, held: HeldThread, text: str) -> None:
        """Learn that a thread goes on for good."""
        self._open.pop(held.number, None)
        self.tell(held, "ended", text)

    def _in_trio(self, is_main: bool, function: Callable[[], None]) -> None:  # noqa: FBT001 - private
        if is_main:
            function()
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(function)

    # ---- in the Trio thread ----------------------------------------------------------------------------------

    def steer(self, hold: int, kind: str, text: str) -> None:
        """Take what a terminal says."""
        held = self._open.get(hold)
        if held is None:
            return
        held.take(kind, text)
        if kind == "detach" and held.is_main and not held.is_stopped:  # it runs, and is traced
            sys.settrace(None)
            held.end()


def debug(proc: Proc, settings: Settings) -> None:
    """Let threads of a worker process be held, as far as its settings say so; called in its Trio run."""
    if settings.debug == "off" or settings.observe == "off":
        refuse_breakpoints("debug" if settings.debug == "off" else "observe")
        return
    debugger = Debugger(proc, settings.debug_wait)
    debugger.install()
    if settings.debug == "post-mortem":
        proc.holds.post_mortem = debugger.post_mortem


def set_back(clock: trio.abc.Clock, seconds: float) -> None:
    """Let the clock of a Trio run have stood still for some seconds: no deadline of the process has come nearer."""
    offset = getattr(clock, "offset", None)
    if isinstance(offset, float):  # of the system; a clock of tests stands still by itself
        object.__setattr__(clock, "offset", offset - seconds)


def _here() -> str:
    """Return the name of the endpoint that runs; empty outside of actors."""
    try:
        context = execution_context()
    except RuntimeError:
        return ""
    return _name_of(context.mesh, context.point, context.endpoint)


def _name_of(mesh: str | None, point: Point | None, endpoint: str | None) -> str:
    name = place_name(mesh or "", point)
    return f"{name}.{endpoint}" if endpoint else name


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its `__str__` is the program's
        return type(error).__name__
