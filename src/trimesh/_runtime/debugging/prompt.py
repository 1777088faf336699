"""pdb at the other end of a link. Imported by the first thread that is held."""

from __future__ import annotations

import code
import dis
import inspect
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from trimesh._runtime.debugging.held_thread import HeldThread

_OURS: Final = ("asyncio", "asyncio.*", "selectors", "trio", "trio.*", "outcome", "outcome.*", "trimesh", "trimesh.*")
"""Steps go over code of these: what is debugged is the program."""

_CTRL_D: Final = "\x04"

_COROUTINES: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Prompt(pdb.Pdb):
    """The debugger of one hold.

    Args:
        held: The thread; must be the calling one.
    """

    def __init__(self, held: HeldThread) -> None:
        super().__init__(stdin=held, stdout=held, skip=_OURS, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self._held = held
        held.prompt = self

    def look_at(self, error: BaseException) -> None:
        """Look around where an error was raised; return when the terminal lets go."""
        self.reset()
        held = self._held
        held.write(f"{type(error).__name__}: {error}\n")
        with held.standing():
            super().interaction(None, error.__traceback__)

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Be at the prompt while the thread stands; pdb calls this at each stop."""
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
        """Stop where a function returns; beyond the outermost one of the program it goes on."""
        super().user_return(frame, return_value)
        if not self.breaks and (frame.f_back is None or self._is_ours(frame.f_back)):
            self._leave()

    def _is_ours(self, frame: FrameType) -> bool:
        return bool(self.is_skipped_module(str(frame.f_globals.get("__name__"))))

    def dispatch_exception(self, frame: FrameType, arg: Any) -> Any:
        """Stop where the program raises; what Trio does with the tasks of others is no news to it."""
        return self.trace_dispatch if self._is_ours(frame) else super().dispatch_exception(frame, arg)

    def dispatch_call(self, frame: FrameType, arg: Any) -> Any:
        """Stop at calls; a coroutine that goes on is not called."""
        if frame.f_code.co_flags & _COROUTINES and _goes_on(frame):
            return frame.f_trace
        return super().dispatch_call(frame, arg)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Pass over a coroutine that waits: it has not returned."""
        if frame.f_code.co_flags & _COROUTINES and not _returns(frame):
            return self.trace_dispatch
        return super().dispatch_return(frame, arg)

    def precmd(self, line: str) -> str:
        """Take the Ctrl-D of a terminal."""
        return "EOF" if line == _CTRL_D else str(super().precmd(line))

    # ---- commands --------------------------------------------------------------------------------------------

    def do_quit(self, arg: str) -> bool:
        """q(uit): leave the thread, which goes on. `trimesh kill` and `trimesh cancel` end things."""
        del arg
        self._go_on()
        return True

    do_q = do_exit = do_detach = do_quit

    def do_EOF(self, arg: str) -> bool:  # noqa: N802 - pdb calls it so
        """Ctrl-D: the same."""
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run, restart: not here."""
        del arg
        self.error("a process of a mesh is not restarted by its debugger; trimesh kill ends it")

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
    return is_resumed or frame.f_trace is not None  # which a frame has that was traced before


def _returns(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
