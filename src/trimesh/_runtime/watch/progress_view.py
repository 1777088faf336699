"""Progress views: one line of a terminal, drawn by rich if installed; a line below a notebook cell; lines of a log.

PX-1 Nothing is written if stderr is not a terminal, unless the setting `progress` is "on".
PX-2 Only the program shows progress: no worker does, and no simulated process.
PX-3 Until `limits.PROGRESS_SECONDS` have passed it only costs a sleeping task.
"""

from __future__ import annotations

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
    """Progress of one operation.

    Attributes:
        total: Number of steps; 0 when it is not known.
        done: Number of finished steps.
        began: Start, by Trio's clock.
        counted_from: Start of the step that `done` counts.
    """

    __slots__ = ("began", "counted_from", "done", "title", "total", "view")

    def __init__(self, title: str, total: int = 0) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.began = self.counted_from = trio.current_time()
        self.view: View | None = None

    def begin(self, title: str) -> None:
        """Continue with a step of unknown length."""
        self.title, self.done, self.total = title, 0, 0
        self.counted_from = trio.current_time()

    @property
    def text(self) -> str:
        """One line for the user: what is done, since when, how fast, and about how long the rest takes."""
        if not self.total or not 0 < self.done < self.total:
            return self.so_far
        counted = trio.current_time() - self.counted_from
        return f"{self.so_far}, about {_duration((self.total - self.done) * counted / self.done)} left"

    @property
    def so_far(self) -> str:
        """The same without the rest."""
        now = trio.current_time()
        done = f"{self.done} of {self.total}, " if self.total else f"{self.done}, " * bool(self.done)
        counted = now - self.counted_from
        rate = f", {self.done / counted:.3g}/s" if self.done and counted > 0 else ""
        return f"{self.title}: {done}{_duration(now - self.began)}{rate}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def progress(on: bool | None) -> None:  # noqa: FBT001 - `progress(False)` reads as it is meant
    """Choose whether starts of processes and jobs, and `map`, show their progress after two seconds.

    Args:
        on: True: always; without a terminal, a line after two seconds and every ten seconds. False: never. None: by
            the setting `progress`, whose default is to show it on a terminal and in a notebook.

    Blocking: no checkpoint. It takes effect at once, for this program.
    """
    global _chosen  # noqa: PLW0603 - of the program, as its stderr is
    _chosen = on


@contextmanager
def showing(proc: Proc, title: str, total: int = 0) -> Generator[ShownProgress, None, None]:
    """Show the progress of an operation until the block is left, after `limits.PROGRESS_SECONDS`.

    Args:
        total: Number of steps; 0 when it is not known.
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
        if found.view is not None:  # here, and not in the task, so that output of the program comes after it
            found.view.close(found)


def _is_wanted(proc: Proc) -> bool:
    if proc.is_simulated or proc.family is None:
        return False
    if _chosen is not None:
        return _chosen
    setting = current().progress
    return setting == "on" or (setting == "auto" and (is_terminal() or is_notebook()))


def is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def is_notebook() -> bool:
    """Return whether this is a kernel of Jupyter."""
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
    """Destination of progress.

    Attributes:
        pause: Seconds between two updates.
    """

    pause: float

    def draw(self, progress: ShownProgress) -> None: ...

    def close(self, progress: ShownProgress) -> None:
        """Remove it."""


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
    """Lines of a file or a pipe; few, because each of them stays."""

    pause = limits.PROGRESS_LOG_SECONDS

    def draw(self, progress: ShownProgress) -> None:
        _write(f"{progress.text}\n")

    def close(self, progress: ShownProgress) -> None:
        _write(f"{progress.so_far}, ended\n")


class RichView:
    """A terminal line with a bar; output meanwhile stays above it.

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
            with suppress(Exception):  # LiveError: rich already shows another one, ours or the program's
                self._bars.start()
        self._bars.update(self._task, completed=progress.done, description=progress.text, refresh=True)

    def close(self, progress: ShownProgress) -> None:
        self._bars.stop()


class CellView:
    """A line of HTML below the cell that runs, with a bar where the number of steps is known."""

    pause = limits.PROGRESS_DRAW_SECONDS

    def __init__(self) -> None:
        self._output = JupyterOutput()

    def draw(self, progress: ShownProgress) -> None:
        import html  # noqa: PLC0415 - only in notebooks, and it is two modules

        bar = f'<progress value="{progress.done}" max="{progress.total}"></progress> ' if progress.total else ""
        self._output.show(f"{bar}<small>{html.escape(progress.text)}</small>")

    def close(self, progress: ShownProgress) -> None:
        self._output.show("")


class JupyterOutput:
    """Output of a cell of Jupyter; it has no place before it shows something."""

    def __init__(self) -> None:
        from IPython import display  # noqa: PLC0415 - only in notebooks

        self._display: Any = display  # untyped
        self._handle: Any = None

    def show(self, html: str) -> None:
        shown = self._display.HTML(html)
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """Keep what is shown."""


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, full or missing: nowhere to report to
        sys.stderr.write(text)
        sys.stderr.flush()
