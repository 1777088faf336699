"""One thread that a debugger holds: what it says and hears, as the file that pdb reads and writes.

The main thread runs no Trio task meanwhile: it reads the links itself, as for values that are waited for without
`await`. Any other thread waits for a queue, and Trio goes on beside it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trimesh import limits

if TYPE_CHECKING:
    from trimesh._runtime.debugging.debugger import Debugger
    from trimesh._runtime.debugging.prompt import Prompt


class HeldThread:
    """A hold, from `breakpoint()` until it goes on for good.

    Args:
        number: Of the hold there.
        is_unwanted: Tells whether what the thread runs is to end.

    Attributes:
        number: As above.
        is_main: Whether it is the thread of Trio.
        is_stopped: Whether it stands still now; a debugger that steps lets it go on in between.
        has_ended: Whether it goes on, and has no terminal any more.
        ident: Of the thread.
        prompt: What the terminal talks to, once there is one.
    """

    def __init__(self, debugger: Debugger, number: int, is_unwanted: Callable[[], bool]) -> None:
        self.number = number
        self.ident = threading.get_ident()
        self.is_main = self.ident == debugger.trio_thread
        self.prompt: Prompt | None = None
        self.is_attached = False
        self.is_stopped = False
        self.has_ended = False
        self._debugger = debugger
        self._is_unwanted = is_unwanted
        self._heard = queue.SimpleQueue[str | None]()
        self._line = ""

    # ---- what a terminal does --------------------------------------------------------------------------------

    def take(self, kind: str, text: str) -> None:
        """Take what the terminal says, in the Trio thread."""
        if kind == "attach":
            self.is_attached = True
            self._heard.put("")
        elif kind == "detach":
            self.is_attached = False
            self._heard.put(None)
        else:
            self._heard.put(text)

    # ---- the thread itself -----------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Generator[None, None, None]:
        """Be where the thread stands still: what waits for it has its deadlines paused."""
        self.is_stopped = True
        resume = self._debugger.stand(is_main=self.is_main)
        try:
            yield
        finally:
            self.is_stopped = False
            resume()

    def wait_for_terminal(self, seconds: float) -> bool:
        """Wait until a terminal has come; return False if none has, or what runs here is to end."""
        ends_at = time.monotonic() + seconds
        while not self.is_attached and not self._is_unwanted() and time.monotonic() < ends_at:
            self._hear()
        return self.is_attached

    def _hear(self) -> str | None:
        """Return what was said, or an empty text after a while."""
        if not self.is_main:
            try:
                return self._heard.get(timeout=limits.DEBUG_TURN_SECONDS)
            except queue.Empty:
                return ""
        if self._heard.empty():
            self._debugger.pump(limits.DEBUG_TURN_SECONDS)
        return "" if self._heard.empty() else self._heard.get()

    def end(self, text: str = "") -> None:
        """Tell that the thread goes on for good. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self._debugger.ended(self, text)

    # ---- a file ----------------------------------------------------------------------------------------------

    encoding = "utf-8"

    def readline(self) -> str:
        """Return the next line from the terminal; an empty text when that has gone."""
        prompt, self._line = self._line, ""
        if self.is_attached:
            self._say("prompt", prompt)
        while self.is_attached:
            if line := self._hear():
                return line
        return ""

    def write(self, text: str) -> int:
        """Show whole lines; what follows them is the prompt of the next `readline`."""
        whole, newline, self._line = (self._line + text).rpartition("\n")
        if newline and self.is_attached:
            shown = whole + newline
            for at in range(0, len(shown), limits.DEBUG_TEXT_CHARS):
                self._say("output", shown[at : at + limits.DEBUG_TEXT_CHARS])
        return len(text)

    def _say(self, kind: str, text: str) -> None:
        self._debugger.tell(self, kind, text)

    def flush(self) -> None:
        """Do nothing: lines leave when they are whole."""

    def isatty(self) -> bool:
        """Return False: what draws is in the terminal."""
        return False
