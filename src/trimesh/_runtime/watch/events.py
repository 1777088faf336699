"""Events of one mesh, published to all its readers (rule T3)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from trimesh import limits
from trimesh._runtime.tasks.crossing import in_trio_block, in_trio_taking
from trimesh._wire import observed
from trimesh._wire.flight import SeenEvent
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import Origin, RemoteTraceback, place_name
from trimesh.events import Died, Event, EventBuffer, Failed, GaveUp, Lagged, MemberEvent, Started, Unacknowledged

if TYPE_CHECKING:
    from trimesh._runtime.recording import FlightRecorder


class EventStream:
    """Events for one reader: `async for event in events`. It ends when the mesh has stopped."""

    def __init__(self, sees: Callable[[int], bool]) -> None:
        self._sees = sees
        self._buffer: EventBuffer = EventBuffer(limits.EVENTS)
        self._news = trio.Event()
        self._is_over = False
        self._taken: list[Event] = []

    def __aiter__(self) -> EventStream:
        return self

    def __anext__(self) -> Awaitable[Event]:
        """Return the next record; `Lagged(n)` in place of n lost ones.

        Blocking: a checkpoint, cancellable; a record that was not returned is not lost.
        """
        return in_trio_taking(self._advance, self._put_back)

    async def _advance(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not (self._taken or self._buffer):
            if self._is_over:
                raise StopAsyncIteration
            await self._news.wait()
        if self._taken:
            return self._taken.pop(0)
        found = self._buffer.take()
        assert found is not None
        return found

    def _put_back(self, event: Event) -> None:
        """Keep a record that has not reached code outside of Trio."""
        self._taken.append(event)
        self._wake()

    def put(self, event: Event) -> None:
        """Queue a record, if this reader sees its member."""
        if isinstance(event, Lagged) or event.point.base_rank is None or self._sees(event.point.base_rank):
            self._buffer.put(event)
            self._wake()

    def end(self) -> None:
        """End the reader's stream."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()


class EventHub:
    """Publishes the records of one mesh to all its readers; a slow one never makes the others wait.

    Attributes:
        origin_of: Returns the place of the member of a rank.
        journal: Keeps the newest records for later queries.
        is_closed: Whether the mesh has stopped.
    """

    def __init__(self, origin_of: Callable[[int], Origin], journal: Journal) -> None:
        self.origin_of = origin_of
        self.journal = journal
        self.is_closed = False
        self._readers: list[EventStream] = []

    def tell(self, kind: type[MemberEvent], rank: int, **details: Any) -> None:
        """Publish a record of one kind about the member of a rank."""
        where = self.origin_of(rank)
        about: dict[str, Any] = {"mesh": where.mesh, "point": where.point, "incarnation": where.incarnation}
        event = cast("Event", kind(**about, **details))
        self.journal.take(event)
        for reader in self._readers:
            reader.put(event)

    def snapshot(self, ranks: Iterable[int]) -> list[Event]:
        """Return the first records of a reader: those of the live members."""
        return [
            Started(mesh=at.mesh, point=at.point, incarnation=at.incarnation, host=at.host, pid=at.pid)
            for at in map(self.origin_of, ranks)
            if at.point is not None
        ]

    def close(self) -> None:
        """End every reader's stream: the mesh has stopped."""
        self.is_closed = True
        for reader in self._readers:
            reader.end()

    def open(self, snapshot: Iterable[Event], sees: Callable[[int], bool]) -> AbstractAsyncContextManager[EventStream]:
        """Read records while the body runs.

        Args:
            snapshot: The records to begin with.
            sees: Whether the reader's view shows the member of a rank.
        """
        return in_trio_block(self._open(snapshot, sees))

    @asynccontextmanager
    async def _open(self, snapshot: Iterable[Event], sees: Callable[[int], bool]) -> AsyncGenerator[EventStream, None]:
        reader = EventStream(sees)
        for event in snapshot:
            reader.put(event)
        if self.is_closed:
            reader.end()
        self._readers.append(reader)
        try:
            await trio.lowlevel.checkpoint()
            yield reader
        finally:
            self._readers.remove(reader)


# ---- journal ---------------------------------------------------------------------------------------------------------

# The newest events of all members that a process owns, as rows for readers.

_FAILURES: Final = (Died, Failed, GaveUp, Unacknowledged)


class Journal:
    """Keeps the newest `limits.OBSERVED_EVENTS` events of one process; the text of an error, never the error.

    Attributes:
        began_at: Unix time at which this process joined its family; a controller joins with its outermost block.
        count: Number of events so far.
        counts: The same by mesh and kind, for the first `limits.METRIC_SERIES` meshes.
        recorder: Also keeps them in a file; None without.
    """

    def __init__(self) -> None:
        self.began_at = time.time()
        self.count = 0
        self.counts: dict[str, dict[str, int]] = {}
        self.recorder: FlightRecorder | None = None
        self._rows: deque[observed.EventRow] = deque(maxlen=limits.OBSERVED_EVENTS)

    def take(self, event: Event) -> None:
        """Record an event of a member."""
        if not isinstance(event, Lagged):
            self.count += 1
            row = _row(self.count, event)
            if row.mesh in self.counts or len(self.counts) < limits.METRIC_SERIES:
                kinds = self.counts.setdefault(row.mesh, {})
                kinds[row.kind] = kinds.get(row.kind, 0) + 1
            self._rows.append(row)
            if self.recorder is not None:
                stack = getattr(event, "stack", "")[: limits.RECORD_STACK_CHARS]
                self.recorder.note(SeenEvent(event=row, stack=stack))

    def after(self, number: int) -> list[observed.EventRow]:
        """Return the kept events with a greater number, oldest first."""
        return [row for row in list(self._rows) if row.number > number]


def _row(number: int, event: MemberEvent) -> observed.EventRow:
    point = dict(event.point)
    error = getattr(event, "error", None) or getattr(event, "cause", None)
    return observed.EventRow(
        number=number,
        at=time.time(),
        kind=type(event).__name__,
        name=place_name(event.mesh, point),
        mesh=event.mesh,
        point=point,
        incarnation=event.incarnation,
        text=_text(event, error),
        is_failure=isinstance(event, _FAILURES),
        causes=() if error is None else causes_of(error),
    )


def _text(event: Any, error: BaseException | None) -> str:
    if error is not None:
        return f"{type(error).__name__}: {error}"[: limits.OBSERVED_TEXT_CHARS]
    if (seconds := getattr(event, "seconds", None)) is not None:
        return f"its Trio loop has not run for {seconds:.1f} s"
    if pid := getattr(event, "pid", None):
        return f"pid {pid} on {event.host}"
    return ""


# ---- causes ----------------------------------------------------------------------------------------------------------

# The causes of an error, as texts: the errors of a group, causes of causes, and where a remote one was raised.

# Compiled on first use.
_RAISED: Final = r"^(?:\w+\.)*\w+(?:: .*)?$"
_PLACE: Final = r'^\s+(File ".*", line \d+, in .*)$'
_TEXT_LINES_MAX: Final = 2_000


def causes_of(error: BaseException) -> tuple[str, ...]:
    """Return the causes of an error, each after the error that it has caused, at most `limits.OBSERVED_CAUSES`."""
    return tuple(text[: limits.OBSERVED_TEXT_CHARS] for text in islice(_behind(error), limits.OBSERVED_CAUSES))


def _behind(error: BaseException) -> Iterator[str]:
    seen = {id(error)}
    todo = _next(error)
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, RemoteTraceback):
            yield from _of_traceback(one.text)
        else:
            yield f"{type(one).__name__}: {one}"
        todo = [*_next(one), *todo]


def _next(error: BaseException) -> list[BaseException]:
    """Return the parts of an error, then the error it was raised from."""
    found: list[BaseException] = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found if behind is None else [*found, behind]


def _of_traceback(text: str) -> Iterator[str]:
    """Yield the place where the error of a traceback was raised, and the errors before it there, newest first."""
    lines = text.splitlines()[-_TEXT_LINES_MAX:]
    place, found = "", list[tuple[str, str]]()
    for line in lines:
        if match := re.match(_PLACE, line):
            place = match[1]
        elif place and re.match(_RAISED, line):
            found.append((line, place))
            place = ""
    for number, (line, at) in enumerate(reversed(found)):
        yield f"at {at}" if number == 0 else f"{line}, at {at}"
