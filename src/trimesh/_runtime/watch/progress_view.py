"""Where people look: one line of a terminal, by rich where it is installed; a line below a cell; lines of a log.

PX-1 Nothing is written where stderr is no terminal, unless the setting `progress` is "on".
PX-2 Only the program shows something: no worker, and nothing that is simulated.
PX-3 Until `limits.PROGRESS_SECONDS` have gone it costs a task that sleeps.
"""

from __future__ import annotations

import html
import shutil
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from trimesh import limits
from trimesh.config import current
from trimesh.context_managers import contextmanager

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


_chosen: bool | None = None


class ShownProgress:
    """How far something is.

    Attributes:
        total: Of how many; 0 when it is not known.
        done: So many are.
        began: When, by Trio's clock.
    """

    __slots__ = ("began", "done", "title", "total", "view")

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.began = trio.current_time()
        self.view: View | None = None

    def begin(self, title: str) -> None:
        """Go on with something of which it is not known how much it is."""
        self.title, self.done, self.total = title, 0, 0

    @property
    def text(self) -> str:
        """One line for people."""
        seconds = int(trio.current_time() - self.began)
        if self.total:
            return f"{self.title}: {self.done} of {self.total}, {seconds} s"
        return f"{self.title}: {f'{self.done}, ' if self.done else ''}{seconds} s"


def progress(on: bool | None) -> None:  # noqa: FBT001 - `progress(False)` reads as it is meant
    """Choose whether what takes more than two seconds shows that it does: starts of processes and jobs, `map`.

    Args:
        on: True: also where stderr is no terminal, a line at first and every ten seconds. False: never. None: as the
            setting `progress` says, which is where stderr is a terminal, or in a notebook.

    Blocking: no checkpoint. It holds for this program, at once.
    """
    global _chosen  # noqa: PLW0603 - of the program, as its stderr is
    _chosen = on


@contextmanager
def showing(proc: Proc, title: str, total: int = 0) -> Generator[ShownProgress, None, None]:
    """Show how far something is, from its third second on, until the block is left.

    Args:
        total: Of how many; 0 when it is not known.
    """
    found = ShownProgress(title, total)
    if not _is_wanted(proc):
        yield found
        return
    scope = trio.CancelScope()
    proc.nursery.start_soon(_show, found, scope)
    try:
        yield found
    finally:
        scope.cancel(reason=f"{title}: done")
        if found.view is not None:  # here, and not in the task: what the program prints next comes after it
            found.view.close(found)


def _is_wanted(proc: Proc) -> bool:
    if proc.is_simulated or proc.family is None:
        return False
    if _chosen is not None:
        return _chosen
    setting = current().progress
    return setting == "on" or (setting == "auto" and (is_terminal() or is_notebook()))


def is_terminal() -> bool:
    """Return whether stderr is one."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


async def _show(found: ShownProgress, scope: trio.CancelScope) -> None:
    with scope:
        await trio.sleep(limits.PROGRESS_SECONDS)
        found.view = view = open_view()
        while True:
            view.draw(found)
            await trio.sleep(view.pause)


# ---- progress view ---------------------------------------------------------------------------------------------------

_CLEAR: Final = "\r\x1b[2K"


class View(Protocol):
    """Where progress is shown.

    Attributes:
        pause: Seconds between two drawings.
    """

    pause: float

    def draw(self, progress: ShownProgress) -> None: ...

    def close(self, progress: ShownProgress) -> None:
        """Show it no more."""


def open_view() -> View:
    if is_notebook():
        return CellView()
    if not is_terminal():
        return LogView()
    with suppress(ImportError):
        return RichView()
    return LineView()


class LineView:
    """The last line of a terminal."""

    pause = limits.PROGRESS_DRAW_SECONDS

    def draw(self, progress: ShownProgress) -> None:
        columns = shutil.get_terminal_size().columns - 1
        _write(_CLEAR + progress.text[:columns])

    def close(self, progress: ShownProgress) -> None:
        _write(_CLEAR)


class LogView:
    """Lines of a file or a pipe, each of which stays: few."""

    pause = limits.PROGRESS_LOG_SECONDS

    def draw(self, progress: ShownProgress) -> None:
        _write(f"{progress.text}\n")

    def close(self, progress: ShownProgress) -> None:
        _write(f"{progress.text}, over\n")


class RichView:
    """A line of a terminal with a bar; what is printed meanwhile stays above it.

    Raises:
        ImportError: rich is not installed.
    """

    pause = limits.PROGRESS_DRAW_SECONDS

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - may not be installed
        from rich.progress import BarColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as Bars  # noqa: PLC0415

        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20)
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task: Any = None

    def draw(self, progress: ShownProgress) -> None:
        if self._task is None:
            self._task = self._bars.add_task(progress.text, total=progress.total or None)
            with suppress(Exception):  # LiveError: another one is shown, by us or by the program, and has the line
                self._bars.start()
        self._bars.update(self._task, completed=progress.done, description=progress.text, refresh=True)

    def close(self, progress: ShownProgress) -> None:
        self._bars.stop()


class CellView:
    """A line of HTML below the cell that runs."""

    pause = limits.PROGRESS_DRAW_SECONDS

    def __init__(self) -> None:
        from IPython import display  # noqa: PLC0415 - only in notebooks

        shown: Any = display  # which has no types
        self._html: Any = shown.HTML
        self._handle: Any = shown.display(self._html(""), display_id=True)

    def draw(self, progress: ShownProgress) -> None:
        self._show(f"<small>{html.escape(progress.text)}</small>")

    def close(self, progress: ShownProgress) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._handle is not None:
            self._handle.update(self._html(text))


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, full, or not there: nothing to tell it to
        sys.stderr.write(text)
        sys.stderr.flush()
