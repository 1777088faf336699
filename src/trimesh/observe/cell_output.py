"""Output below the running cell of a notebook, replaced as often as it changes: in Jupyter and in marimo.

OC-1 Jupyter updates a display by its id from any thread. marimo takes output only from a thread that was made in the
     cell: one shows the newest that the others hand to it, and ends with `close`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

from trimesh import limits
from trimesh._runtime.watch import JupyterOutput, is_notebook


class CellOutput(Protocol):
    """Output of one cell."""

    def show(self, html: str) -> None:
        """Replace what was shown before; from any thread, without waiting."""

    def close(self) -> None:
        """Stop; what was shown last stays."""


def open_cell_output() -> CellOutput | None:
    """Return the output of the running cell, None outside of a notebook. To be called in the thread of the cell."""
    if is_notebook():
        return JupyterOutput()
    marimo: Any = sys.modules.get("marimo")
    return MarimoOutput(marimo) if marimo is not None and marimo.running_in_notebook() else None


class MarimoOutput:
    """Output of a cell of marimo."""

    def __init__(self, marimo: Any) -> None:
        self._marimo = marimo
        self._html = ""
        self._news = threading.Condition()
        self._is_shown, self._is_closed = True, False
        self._thread: Any = marimo.Thread(target=self._run, name="trimesh cell output", daemon=True)

    def show(self, html: str) -> None:
        if not self._html:
            self._thread.start()
        with self._news:
            self._html, self._is_shown = html, False
            self._news.notify()

    def close(self) -> None:
        """Show the last output and end the thread; one that marimo holds up is left to it."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._html:
            self._thread.join(limits.LIVE_LAST_SECONDS)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or not self._is_shown)
                if self._is_shown:
                    return
                html, self._is_shown = self._html, True
            self._marimo.output.replace(self._marimo.Html(html))
