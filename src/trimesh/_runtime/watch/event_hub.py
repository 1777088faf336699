"""The events of one mesh, on their way to all its readers (rule T3)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast

import trio

from trimesh import limits
from trimesh._runtime.tasks.foreign import in_trio_block, in_trio_taking
from trimesh._runtime.values.reference import MeshInfo
from trimesh.context_managers import asynccontextmanager
from trimesh.events import Event, EventBuffer, Lagged, MemberEvent, Started

if TYPE_CHECKING:
    from trimesh._runtime.watch.journal import Journal


class EventStream:
    """What one reader reads: `async for event in events`. It ends when the mesh has stopped."""

    def __init__(self, is_seen: Callable[[Event], bool]) -> None:
        self._is_seen = is_seen
        self._buffer: EventBuffer = EventBuffer(limits.EVENTS)
        self._news = trio.Event()
        self._is_over = False
        self._taken: list[Event] = []

    def __aiter__(self) -> EventStream:
        return self

    def __anext__(self) -> Awaitable[Event]:
        """Return the next record; `Lagged(n)` in place of n that were lost.

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
        """Keep a record that has not come to code outside of Trio."""
        self._taken.append(event)
        self._wake()

    def put(self, event: Event) -> None:
        """Add a record, if this reader sees its member."""
        if self._is_seen(event):
            self._buffer.put(event)
            self._wake()

    def end(self) -> None:
        """Let the reader come to the end."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()


class EventHub:
    """Publishes the records of one mesh to all its readers; a slow one never makes the others wait.

    Attributes:
        info: Returns the mesh as it is now.
        journal: Notes every record, for who asks later.
        is_closed: Whether the mesh has stopped.
    """

    def __init__(self, info: Callable[[], MeshInfo], journal: Journal) -> None:
        self.info = info
        self.journal = journal
        self.is_closed = False
        self._readers: list[EventStream] = []

    def tell(self, kind: type[MemberEvent], rank: int, **details: Any) -> None:
        """Publish a record of one kind about the member of a rank."""
        self.publish(self._record(kind, rank, details))

    def _record(self, kind: type[MemberEvent], rank: int, details: dict[str, Any]) -> Event:
        info = self.info()
        about: dict[str, Any] = {
            "mesh": info.name,
            "point": info.whole.point(rank),
            "incarnation": info.members[rank].incarnation,
        }
        return cast("Event", kind(**about, **details))

    def snapshot(self, ranks: Iterable[int]) -> list[Event]:
        """Return the records with which a reader begins: those of the members that live."""
        members = self.info().members
        return [
            self._record(Started, rank, {"host": members[rank].host, "pid": members[rank].pid or None})
            for rank in ranks
        ]

    def publish(self, event: Event) -> None:
        """Give a record to every reader."""
        self.journal.take(event)
        for reader in self._readers:
            reader.put(event)

    def close(self) -> None:
        """End every reader's stream: the mesh has stopped."""
        self.is_closed = True
        for reader in self._readers:
            reader.end()

    def open(self, snapshot: Iterable[Event], sees: Callable[[int], bool]) -> AbstractAsyncContextManager[EventStream]:
        """Read records while the body runs.

        Args:
            snapshot: The records to begin with.
            sees: Whether the reader wants to hear of the member of a rank.
        """
        return in_trio_block(self._open(snapshot, sees))

    @asynccontextmanager
    async def _open(self, snapshot: Iterable[Event], sees: Callable[[int], bool]) -> AsyncGenerator[EventStream, None]:

        def is_seen(event: Event) -> bool:
            return isinstance(event, Lagged) or event.point.base_rank is None or sees(event.point.base_rank)

        reader = EventStream(is_seen)
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
