"""Debugger support in a worker: holds its threads at `breakpoint()` and, on request, at errors that leave an endpoint.

DB-1 A held thread waits `seconds` for a terminal; it continues if none attaches or its call is cancelled.
DB-2 While the main thread is held no task runs in its process, and the clock of its Trio run stands still.
DB-3 The thread continues when its terminal disconnects or its run ends. A terminal may leave it held instead, at a
     prompt: then it waits as in DB-1.
"""

from __future__ import annotations

import code
import dis
import inspect
import itertools
import os
import pdb
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import find_cell
from trimesh._runtime.actors.context import execution_context
from trimesh._runtime.system.forks import refuse_breakpoints
from trimesh._runtime.tasks import place_outside
from trimesh._wire import observed
from trimesh.config import Settings
from trimesh.errors import Origin, leaves, origin, place_name
from trimesh.ids import AGENT
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


_ENDING: Final = ("stop", "exit")
"""Endpoints of the agent that end the actor or the process."""


class Debugger:
    """Holds threads of a worker process.

    Args:
        proc: The process, in whose Trio run this is made.
        seconds: How long a held thread waits for a terminal.

    Attributes:
        trio_thread: Ident of the main thread, which runs Trio.
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
        """Install the hook of `breakpoint()`, unless `PYTHONBREAKPOINT` or the program has set one."""
        if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = self.stop

    # ---- in the thread that is held --------------------------------------------------------------------------

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Hold the calling thread at its current line; the hook of `breakpoint()`."""
        del args, kwargs
        frame = sys._getframe(1)  # noqa: SLF001 - as pdb does
        known = next((one for one in self._open.values() if one.ident == threading.get_ident()), None)
        if known is not None and (known.is_stopped or known.prompt is None):
            return  # called from the prompt of a terminal
        if known is not None and known.prompt is not None:  # the thread is being stepped, or has breakpoints
            known.prompt.set_trace(frame)
            return
        name = _here() or self._own_name()
        held = self._hold("breakpoint", name, (frame, frame.f_lineno), "")
        with held.standing():
            found = held.wait_for_terminal()
        if found:
            Prompt(held).set_trace(frame)
        else:
            held.end(f"{name} continues: no debugger attached")

    def post_mortem(self, error: BaseException, where: Origin) -> None:
        """Hold the calling thread at an error that left an endpoint; not at errors of other processes."""
        traceback = _innermost(error.__traceback__)
        if traceback is None or any(origin(leaf) is not None for leaf in leaves(error)):
            return
        name, found = _name_of(where.mesh, where.point, where.endpoint), False
        held = self._hold("post-mortem", name, (traceback.tb_frame, traceback.tb_lineno), _text_of(error))
        try:
            with held.standing():
                found = held.wait_for_terminal()
            if found:
                Prompt(held).look_at(error)
        finally:
            held.end("" if found else f"{name} raises its error: no debugger attached")

    def _hold(self, kind: str, name: str, place: tuple[FrameType, int], text: str) -> HeldThread:
        held = HeldThread(self, next(self._numbers), self._ending_of(), self._seconds)
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
        """Return a function that checks whether the calling code is to end: its call, actor or process is ended."""
        cell, call = find_cell(), None
        if cell is not None and threading.get_ident() == self.trio_thread:
            task: trio.lowlevel.Task | None
            if trio.lowlevel.in_trio_task():
                task = trio.lowlevel.current_task()
            else:  # an asyncio task, whose loop drives Trio
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
        """Read links in the held main thread, for at most `seconds`."""
        self._proc.pump(seconds)

    def tell(self, held: HeldThread, kind: str, text: str) -> None:
        """Report news of a held thread to the controller; called in that thread."""
        self._in_trio(held.is_main, partial(self._proc.holds.tell, held.number, kind, text))
        if held.is_main:
            self._proc.pump(0)

    def stand(self, *, is_main: bool) -> Callable[[], None]:
        """Record that a thread is held; return the callback for when it continues."""
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
        """End a hold: the thread continues without a debugger."""
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
        """Handle input from the terminal of a hold, in the Trio thread."""
        held = self._open.get(hold)
        if held is None:
            return
        held.take(kind, text)
        if kind == "detach" and held.is_main and not held.is_stopped:  # it runs, traced by pdb
            sys.settrace(None)
            held.end()


def debug(proc: Proc, settings: Settings) -> None:
    """Install debugging in a worker process as its settings say; called in its Trio run."""
    if settings.debug == "off" or settings.observe == "off":
        refuse_breakpoints("debug" if settings.debug == "off" else "observe")
        return
    debugger = Debugger(proc, settings.debug_wait)
    debugger.install()
    if settings.debug == "post-mortem":
        proc.holds.post_mortem = debugger.post_mortem


def set_back(clock: trio.abc.Clock, seconds: float) -> None:
    """Set the clock of a Trio run back, as if it had stood still for `seconds`: no deadline has come nearer."""
    offset = getattr(clock, "offset", None)
    if isinstance(offset, float):  # the system clock of Trio; clocks of tests stand still by themselves
        object.__setattr__(clock, "offset", offset - seconds)


def _here() -> str:
    """Return the name of the running endpoint; empty outside of actors."""
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


# ---- one held thread: the file that pdb reads and writes -------------------------------------------------------------

# While the main thread is held it runs no Trio task, and reads the links itself, as in waits without `await`. Any other
# thread waits for a queue, and Trio runs meanwhile.


class HeldThread:
    """A held thread, from `breakpoint()` until it continues without a debugger.

    Args:
        number: Number of the hold in this process.
        is_unwanted: Returns whether the thread's code is to end.
        seconds: How long it waits for a terminal.

    Attributes:
        number: As above.
        is_main: Whether it is the thread of Trio.
        is_attached: Whether a terminal is attached.
        is_stopped: Whether it stands still now; it does not while the debugger steps or continues it.
        has_ended: Whether the hold is over.
        ident: Ident of the thread.
        prompt: Its debugger, once a terminal has attached.
    """

    def __init__(self, debugger: Debugger, number: int, is_unwanted: Callable[[], bool], seconds: float) -> None:
        self.number = number
        self.ident = threading.get_ident()
        self.is_main = self.ident == debugger.trio_thread
        self.prompt: Prompt | None = None
        self.is_attached = False
        self.is_stopped = False
        self.has_ended = False
        self._debugger = debugger
        self._is_unwanted = is_unwanted
        self._seconds = seconds
        self._is_left = False
        self._heard = queue.SimpleQueue[str | None]()
        self._line = ""

    # ---- input of the terminal -------------------------------------------------------------------------------

    def take(self, kind: str, text: str) -> None:
        """Queue input of the terminal, in the Trio thread."""
        if kind == "attach":
            self.is_attached = True
            self._heard.put("")
        elif kind in ("detach", "leave"):
            self._is_left = kind == "leave"
            self.is_attached = False
            self._heard.put(None)
        else:
            self._heard.put(text)

    # ---- the thread itself -----------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Generator[None, None, None]:
        """Hold the thread inside the block; deadlines of callers that wait for it are paused."""
        self.is_stopped = True
        resume = self._debugger.stand(is_main=self.is_main)
        try:
            yield
        finally:
            self.is_stopped = False
            resume()

    def wait_for_terminal(self) -> bool:
        """Wait until a terminal attaches; return False if none does in time, or the thread's code is to end."""
        ends_at = time.monotonic() + self._seconds
        while not self.is_attached and not self._is_unwanted() and time.monotonic() < ends_at:
            self._hear()
        return self.is_attached

    def _hear(self) -> str | None:
        """Return the next input; None to detach, an empty text after `limits.DEBUG_TURN_SECONDS` without any."""
        if not self.is_main:
            try:
                return self._heard.get(timeout=limits.DEBUG_TURN_SECONDS)
            except queue.Empty:
                return ""
        if self._heard.empty():
            self._debugger.pump(limits.DEBUG_TURN_SECONDS)
        return "" if self._heard.empty() else self._heard.get()

    def end(self, text: str = "") -> None:
        """End the hold; `text` says why, for the terminal or the log. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self._debugger.ended(self, text)

    # ---- the file of pdb -------------------------------------------------------------------------------------

    encoding = "utf-8"

    def readline(self) -> str:
        """Return the next line from a terminal; an empty text when the last one has detached."""
        prompt, self._line = self._line, ""
        while self.is_attached:
            self._say("prompt", prompt)
            while self.is_attached:
                if line := self._hear():
                    return line
            if self._is_left:
                self.wait_for_terminal()
        return ""

    def write(self, text: str) -> int:
        """Show whole lines; the rest becomes the prompt of the next `readline`."""
        whole, newline, self._line = (self._line + text).rpartition("\n")
        if newline and self.is_attached:
            shown = whole + newline
            for at in range(0, len(shown), limits.DEBUG_TEXT_CHARS):
                self._say("output", shown[at : at + limits.DEBUG_TEXT_CHARS])
        return len(text)

    def _say(self, kind: str, text: str) -> None:
        self._debugger.tell(self, kind, text)

    def flush(self) -> None:
        """Do nothing: `write` sends whole lines at once."""

    def isatty(self) -> bool:
        """Return False: line editing happens at the terminal."""
        return False


# ---- pdb at the other end of a link ----------------------------------------------------------------------------------

_OURS: Final = ("asyncio", "asyncio.*", "selectors", "trio", "trio.*", "outcome", "outcome.*", "trimesh", "trimesh.*")
"""Modules that stepping skips: the user debugs the program, not the runtime."""

_CTRL_D: Final = "\x04"

_COROUTINES: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Prompt(pdb.Pdb):
    """The debugger of one hold.

    Args:
        held: The thread, which must be the calling one.
    """

    def __init__(self, held: HeldThread) -> None:
        super().__init__(stdin=held, stdout=held, skip=_OURS, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self._held = held
        held.prompt = self

    def look_at(self, error: BaseException) -> None:
        """Run the prompt where an error was raised, until the terminal continues or detaches."""
        self.reset()
        held = self._held
        held.write(f"{type(error).__name__}: {error}\n")
        with held.standing():
            super().interaction(None, error.__traceback__)

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Run the prompt while the thread is held; pdb calls this at each stop."""
        held = self._held
        if held.is_attached:
            with held.standing():
                super().interaction(frame, traceback)
        else:
            self._go_on()
        if not held.is_attached or sys.gettrace() is None:
            self._leave()

    def _leave(self) -> None:
        self._go_on()
        self._held.end()

    def _go_on(self) -> None:
        self.clear_all_breaks()
        self.set_continue()

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop where a function returns; continue where the outermost one of the program does."""
        super().user_return(frame, return_value)
        if not self.breaks and (frame.f_back is None or self._is_ours(frame.f_back)):
            self._leave()

    def _is_ours(self, frame: FrameType) -> bool:
        return bool(self.is_skipped_module(str(frame.f_globals.get("__name__"))))

    def dispatch_exception(self, frame: FrameType, arg: Any) -> Any:
        """Stop where the program raises, not where Trio or trimesh do."""
        return self.trace_dispatch if self._is_ours(frame) else super().dispatch_exception(frame, arg)

    def dispatch_call(self, frame: FrameType, arg: Any) -> Any:
        """Stop at calls; resuming a coroutine does not count as one."""
        if frame.f_code.co_flags & _COROUTINES and _goes_on(frame):
            return frame.f_trace
        return super().dispatch_call(frame, arg)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Stop at returns; a coroutine that waits has not returned."""
        if frame.f_code.co_flags & _COROUTINES and not _returns(frame):
            return self.trace_dispatch
        return super().dispatch_return(frame, arg)

    def precmd(self, line: str) -> str:
        """Translate the Ctrl-D of a terminal."""
        return "EOF" if line == _CTRL_D else str(super().precmd(line))

    # ---- commands --------------------------------------------------------------------------------------------

    def do_quit(self, arg: str) -> bool:
        """q(uit): detach; the thread continues. `trimesh kill` and `trimesh cancel` end processes and calls."""
        del arg
        self._go_on()
        return True

    do_q = do_exit = do_detach = do_quit

    def do_EOF(self, arg: str) -> bool:  # noqa: N802 - pdb calls it so
        """Ctrl-D: detach, as q(uit) does."""
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run, restart: not available in a mesh."""
        del arg
        self.error("a debugger cannot restart a process of a mesh; `trimesh kill` ends it")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact: a shell with the names of the frame; Ctrl-D leaves it."""
        del arg
        assert self.curframe is not None
        names = {**self.curframe.f_globals, **self.curframe.f_locals}
        shell = _Shell(names, self._held)
        stdout, displayhook = sys.stdout, sys.displayhook
        sys.stdout, sys.displayhook = self._held, self._show
        try:
            shell.interact(banner="*interact: Ctrl-D leaves*", exitmsg="*exits interact*")
        finally:
            sys.stdout, sys.displayhook = stdout, displayhook

    def _show(self, value: object) -> None:
        if value is not None:
            self._held.write(f"{value!r}\n")


class _Shell(code.InteractiveConsole):
    def __init__(self, names: dict[str, Any], held: HeldThread) -> None:
        super().__init__(names)
        self._held = held
        self.raw_input: Callable[..., str] = self._ask

    def _ask(self, prompt: str = "") -> str:
        self._held.write(prompt)
        line = self._held.readline()
        if not line or line == f"{_CTRL_D}\n":
            raise EOFError
        return line.removesuffix("\n")

    def write(self, data: str) -> None:
        self._held.write(data)


def _goes_on(frame: FrameType) -> bool:
    code = frame.f_code.co_code
    is_resumed = dis.opname[code[frame.f_lasti]] == "RESUME" and code[frame.f_lasti + 1] & 3 != 0
    return is_resumed or frame.f_trace is not None  # set in a frame that was traced before


def _returns(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
