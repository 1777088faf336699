"""Where people look: one line of a terminal, by rich where it is installed; a line below a cell; lines of a log."""

from __future__ import annotations

import html
import shutil
import sys
from contextlib import suppress
from typing import Any, Final, Protocol

from trimesh import limits
from trimesh._runtime.watch.shown_progress import ShownProgress, is_notebook, is_terminal

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
