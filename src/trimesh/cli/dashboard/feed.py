"""Page feed: polls a run while browsers follow, and hands the newest board to all of them.

FW-1 A slow follower skips boards: it gets the newest, never a queue of old ones.
FW-2 If a run does not answer, its last board stays, with the reason; after its end, also with the cause of death.
FW-3 Time before the page was opened, and between two browsers, is filled from the history of the run.

SO-1 A failed connection is opened again: a run closes idle ones, and a stopped run may continue.
SO-2 The end of a run is detected by its socket, not by its silence.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from trimesh import limits
from trimesh.cli.dashboard.board import Board, SeenRun, see, with_end
from trimesh.cli.dashboard.detail import page_json
from trimesh.errors import ConnectError
from trimesh.observe import (
    Cause,
    ObservedRun,
    OutputRow,
    RunSnapshot,
    SampleRow,
    autopsy,
    find_run,
    query,
    read_record,
    runs,
)
from trimesh.observe.curves import Curves
from trimesh.observe.past import Past, read_past
from trimesh.observe.sums import RunSums


class ShownRun(Protocol):
    """A run that the page shows; its methods may block."""

    def snapshot(self) -> RunSnapshot: ...
    def output(self, after: int) -> Sequence[OutputRow]: ...
    def samples(self, after: int) -> tuple[int, Sequence[SampleRow]]: ...
    def past(self, after: float, *, curves: bool) -> Past: ...
    def kill(self, proc_id: str) -> None: ...
    def cancel(self, call_id: str) -> None: ...
    def has_ended(self) -> bool: ...
    def cause(self) -> Cause | None: ...
    def cores(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class PageFeed:
    """The newest board of one run.

    Args:
        source: The run.
        every: Polling interval in seconds.

    Attributes:
        seen: The newest board and its sources; None before the first query.
        followers: Number of browsers that follow.
        curves: Curves of the program's metrics.
    """

    def __init__(self, source: ShownRun, every: float = limits.PAGE_SECONDS) -> None:
        self.seen: SeenRun | None = None
        self.followers = 0
        self.curves = Curves()
        self._source = source
        self._every = every
        self._data = b""
        self._number = 0
        self._history = deque[RunSums](maxlen=limits.PAGE_HISTORY)
        self._changed = trio.Event()
        self._wanted = trio.Event()

    async def run(self) -> None:
        """Poll until the run has ended: once at the start, then while a browser follows (DX-4)."""
        while True:
            begun_at = trio.current_time()
            try:
                seen, data, history = await trio.to_thread.run_sync(self._look, self.seen)
            except ConnectError as error:
                await self._lost(str(error))
                if self.seen is not None and self.seen.board.state == "ended":
                    return
            else:
                self._history += history
                self._publish(seen, data)
            await trio.sleep_until(begun_at + self._every)
            if not self.followers:
                self._wanted = trio.Event()
                self._data = b""  # the next browser waits for a new snapshot
                await self._wanted.wait()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yield the sums of earlier boards once there is a board, then boards, as server-sent events."""
        self.followers += 1
        self._wanted.set()
        try:
            number = -1
            while True:
                if self._number != number and self._data:
                    if number < 0:
                        yield _event("history", page_json(list(self._history)))
                    number = self._number
                    yield self._data
                else:
                    await self._changed.wait()
        finally:
            self.followers -= 1

    def _look(self, before: SeenRun | None) -> tuple[SeenRun, bytes, list[RunSums]]:
        """Query the run, compute the board and encode it; in a thread. The sums of a pause are those of the history."""
        later = self._source.snapshot()
        past = Past()
        last = 0.0 if before is None else before.snapshot.taken_at
        if later.taken_at - last > limits.HISTORY_USAGE_SECONDS + self._every:
            past = self._source.past(last, curves=before is None)
        if before is None:
            self.curves.load(past)
        with suppress(ConnectError):  # an older run has no samples; one that has ended is noticed by the next snapshot
            self.curves.newest, samples = self._source.samples(self.curves.newest)
            self.curves.add(samples)
        self.curves.look(later)
        earlier = None if before is None else before.snapshot
        seen = see(later, earlier, number=self._number + 1, cores=self._source.cores())
        sums = _timed(seen, before)
        board = msgspec.structs.replace(seen.board, sums=sums, curves=len(self.curves))
        seen = msgspec.structs.replace(seen, board=board)
        before_it = [one for one in past.sums if one.at < sums.at]
        return seen, _event("board", page_json(seen.board)), [*before_it, sums]

    async def _lost(self, said: str) -> None:
        has_ended = await trio.to_thread.run_sync(self._has_ended)
        before = self.seen if self.seen is not None else _nothing()
        state = "ended" if has_ended else "silent"
        cause = await trio.to_thread.run_sync(self._source.cause) if has_ended else None
        seen = with_end(before, state, said, cause, number=self._number + 1)
        self._publish(seen, _event("board", page_json(seen.board)))

    def _has_ended(self) -> bool:
        try:
            return self._source.has_ended()
        except ConnectError:
            return False

    def _publish(self, seen: SeenRun, data: bytes) -> None:
        self.seen, self._data = seen, data
        self._number += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _nothing() -> SeenRun:
    snapshot = RunSnapshot(taken_at=0.0)
    return SeenRun(Board(at=0.0, sums=RunSums(at=0.0)), snapshot, (), ())


def _event(kind: str, data: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _timed(seen: SeenRun, before: SeenRun | None) -> RunSums:
    """Return the sums of a board, with the latency of calls since the previous board."""
    since = seen.snapshot.taken_at - limits.PAGE_SECONDS if before is None else before.snapshot.taken_at
    busiest = sorted(seen.activities, key=lambda one: -one.received)
    paths = [one.proc.record for one in busiest if one.proc.record and one.received]
    lasted = _lasted(paths[: limits.PAGE_LATENCY_PROCS], since)
    if not lasted:
        return seen.board.sums
    return msgspec.structs.replace(
        seen.board.sums, p50=lasted[len(lasted) // 2], p99=lasted[min(len(lasted) - 1, len(lasted) * 99 // 100)]
    )


def _lasted(paths: Sequence[str], since: float) -> list[float]:
    found = list[float]()
    for path in paths:
        try:
            calls = read_record(path).calls
        except ValueError:  # on another host, or gone
            continue
        found += [
            one.lasted for one in calls if one.outcome and one.name and one.name.mesh and one.at + one.lasted >= since
        ]
    return sorted(found)


# ---- the run that the page shows, queried in threads of the page's process -------------------------------------------

T = TypeVar("T")

_QUICK_SECONDS: Final = 1.0
"""A connection that the run closed for idleness fails within this time; a query to a silent run takes longer."""


class RunSource:
    """A running program of this user on this machine. Its methods may block, so the page calls them in threads.

    Args:
        pid: Process id of its controller; None for the only run.

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
        """Return the output lines after a line number."""
        return self._asked(lambda run: run.output(after))

    def samples(self, after: int) -> tuple[int, Sequence[SampleRow]]:
        """Return the number of the newest sample of metrics, and those after a number."""
        return self._asked(lambda run: run.samples(after))

    def past(self, after: float, *, curves: bool) -> Past:
        """Return what the history has; sums after a Unix time."""
        return read_past(partial(query, pid=self.pid), after, curves=curves)

    def kill(self, proc_id: str) -> None:
        self._done(lambda run: run.kill(proc_id))

    def cancel(self, call_id: str) -> None:
        self._done(lambda run: run.cancel(call_id))

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        found = runs()
        for one in found:
            one.close()
        return self.pid not in [one.pid for one in found]

    def cause(self) -> Cause | None:
        """Return the cause of death of the run, if its flight records show one."""
        with suppress(ConnectError):
            return autopsy(pid=self.pid).cause
        return None

    def cores(self) -> dict[str, float]:
        """Return nothing: the cores that processes use are counted between snapshots."""
        return {}

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _asked(self, ask: Callable[[ObservedRun], T]) -> T:
        """Query over the existing connection; over a new one if that has been closed meanwhile (SO-1)."""
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
        """Request an action over a new connection, and never twice."""
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
