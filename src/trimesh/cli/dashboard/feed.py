"""Looks at a run, again and again while browsers follow, and hands the newest board to all of them.

FW-1 A follower that is slow leaves boards out: it gets the newest, never a queue of old ones.
FW-2 A run that does not answer leaves what was seen last, and says why; when it has ended, also what it has died of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence

import msgspec
import trio

from trimesh import limits
from trimesh.cli.dashboard.board import Board, BoardSums, SeenRun, see, with_end
from trimesh.cli.dashboard.encode import page_json
from trimesh.cli.dashboard.source import RunSource
from trimesh.errors import ConnectError
from trimesh.observe import RunSnapshot, read_record


class PageFeed:
    """The newest board of one run.

    Args:
        source: The run.
        every: Seconds between two looks.

    Attributes:
        seen: The newest board, with what it was made of; None before the first look.
        followers: How many browsers follow.
    """

    def __init__(self, source: RunSource, every: float = limits.PAGE_SECONDS) -> None:
        self.seen: SeenRun | None = None
        self.followers = 0
        self._source = source
        self._every = every
        self._data = b""
        self._number = 0
        self._history = deque[BoardSums](maxlen=limits.PAGE_HISTORY)
        self._changed = trio.Event()
        self._wanted = trio.Event()

    async def run(self) -> None:
        """Look until cancelled: once at the start, then while a browser follows (DX-4)."""
        while True:
            begun_at = trio.current_time()
            try:
                seen, data, history = await trio.to_thread.run_sync(self._look, self.seen)
            except ConnectError as error:
                await self._lost(str(error))
            else:
                self._history.append(history)
                self._publish(seen, data)
            await trio.sleep_until(begun_at + self._every)
            if not self.followers:
                self._wanted = trio.Event()
                await self._wanted.wait()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yield the sums of earlier looks, then boards, as server-sent events."""
        self.followers += 1
        self._wanted.set()
        try:
            yield _event("history", page_json(list(self._history)))
            number = -1
            while True:
                if self._number != number and self._data:
                    number = self._number
                    yield self._data
                else:
                    await self._changed.wait()
        finally:
            self.followers -= 1

    def _look(self, before: SeenRun | None) -> tuple[SeenRun, bytes, BoardSums]:
        """Ask, fold and encode; in a thread."""
        later = self._source.snapshot()
        seen = see(later, None if before is None else before.snapshot, number=self._number + 1)
        sums = _timed(seen, before)
        seen = msgspec.structs.replace(seen, board=msgspec.structs.replace(seen.board, sums=sums))
        return seen, _event("board", page_json(seen.board)), sums

    async def _lost(self, said: str) -> None:
        has_ended = await trio.to_thread.run_sync(self._has_ended)
        before = self.seen if self.seen is not None else _nothing()
        state = "ended" if has_ended else "silent"
        if before.board.state == "ended":
            return
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
    return SeenRun(Board(at=0.0, sums=BoardSums(at=0.0)), snapshot, (), ())


def _event(kind: str, data: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _timed(seen: SeenRun, before: SeenRun | None) -> BoardSums:
    """Return the sums of a look, with how long calls took since the one before."""
    since = seen.snapshot.taken_at - limits.PAGE_SECONDS if before is None else before.snapshot.taken_at
    busiest = sorted(seen.activities, key=lambda one: -one.received)
    paths = [one.proc.record for one in busiest if one.proc.record and one.received]
    lasted = _lasted(paths[: limits.PAGE_LATENCY_PROCS], since)
    if not lasted:
        return seen.board.sums
    return msgspec.structs.replace(
        seen.board.sums, half=lasted[len(lasted) // 2], most=lasted[min(len(lasted) - 1, len(lasted) * 99 // 100)]
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
