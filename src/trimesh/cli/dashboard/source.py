"""The run that the page shows, asked in threads of the page's process.

SO-1 A connection that has failed is made anew: a run closes those that are idle, and one that was stopped may go on.
SO-2 Whether a run has ended is told by its socket, not by its silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from trimesh.errors import ConnectError
from trimesh.observe import Cause, ObservedRun, OutputRow, RunSnapshot, autopsy, find_run, runs

T = TypeVar("T")

_QUICK_SECONDS: Final = 1.0
"""In which a connection fails that the run has closed, as it was idle; one to a run that is silent takes longer."""


class RunSource:
    """A running program of this user on this machine. Its methods may block, so the page calls them in threads.

    Args:
        pid: Of its controller; None for the only one there is.

    Raises:
        ConnectError: There is no such run, or more than one.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._run: ObservedRun | None = find_run(pid)
        self.pid = self._run.pid
        self._lock = threading.Lock()

    def snapshot(self) -> RunSnapshot:
        return self._asked(ObservedRun.snapshot)

    def output(self, after: int) -> Sequence[OutputRow]:
        """Return lines after a number."""
        return self._asked(lambda run: run.output(after))

    def kill(self, proc_id: str) -> None:
        self._done(lambda run: run.kill(proc_id))

    def cancel(self, call_id: str) -> None:
        self._done(lambda run: run.cancel(call_id))

    def has_ended(self) -> bool:
        """Return whether the run is not there any more."""
        found = runs()
        for one in found:
            one.close()
        return self.pid not in [one.pid for one in found]

    def cause(self) -> Cause | None:
        """Return what the run has died of."""
        with suppress(ConnectError):
            return autopsy(pid=self.pid).cause
        return None

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _asked(self, ask: Callable[[ObservedRun], T]) -> T:
        """Ask, over the connection there is; over a new one, if that has been closed meanwhile (SO-1)."""
        with self._lock:
            begun_at, is_old = time.monotonic(), self._run is not None
            try:
                return ask(self._connected())
            except ConnectError:
                self._hang_up()
                if not is_old or time.monotonic() - begun_at > _QUICK_SECONDS:
                    raise
            return ask(self._connected())

    def _done(self, act: Callable[[ObservedRun], None]) -> None:
        """Have something done, which is asked for once."""
        with find_run(self.pid) as run:
            act(run)

    def _connected(self) -> ObservedRun:
        if self._run is None:
            self._run = find_run(self.pid)
        return self._run

    def _hang_up(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
