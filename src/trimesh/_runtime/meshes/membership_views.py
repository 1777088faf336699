"""The numbered views of one mesh of processes, on their way to all readers.

VW-1 a reader gets the present state and what has changed since its last look: one that is slow skips numbers and loses
     no change, and nothing is kept for it but its last look.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager

import trio

from trimesh._runtime.tasks.foreign import in_trio_block, in_trio_taking
from trimesh._supervision.policy import Roster
from trimesh.context_managers import asynccontextmanager
from trimesh.events import Departed, MembershipView
from trimesh.shape.region import Region


class ViewReader:
    """What one reader reads: `async for view in views`. It ends when the mesh has stopped."""

    def __init__(self, hub: MembershipHub) -> None:
        self._hub = hub
        self._seen: tuple[int, Mapping[int, int]] = (-1, {})
        self._before: tuple[int, Mapping[int, int]] = self._seen

    def __aiter__(self) -> ViewReader:
        return self

    def __anext__(self) -> Awaitable[MembershipView]:
        """Return the present view, once it is another one than the last; the first one at once.

        Blocking: a checkpoint, cancellable; a view that was not returned is not lost.

        Raises:
            StopAsyncIteration: The mesh has stopped.
        """
        return in_trio_taking(self._advance, self._put_back)

    async def _advance(self) -> MembershipView:
        await trio.lowlevel.checkpoint()
        hub = self._hub
        while hub.roster.epoch == self._seen[0]:
            if hub.is_closed:
                raise StopAsyncIteration
            await hub.news.wait()
        self._before, view = self._seen, hub.view(self._seen[1])
        self._seen = hub.roster.epoch, dict(hub.roster.present)
        return view

    def _put_back(self, _: MembershipView) -> None:
        """Look again later: the view has not come to code outside of Trio."""
        self._seen = self._before


class MembershipHub:
    """Notes who is in a mesh.

    Attributes:
        news: Set at the next change.
        is_closed: Whether the mesh has stopped.
    """

    def __init__(self, shape: Callable[[], tuple[Region, Region]]) -> None:
        """Begin without members.

        Args:
            shape: Returns the mesh as it is shown now, and all the places that it has ever had.
        """
        self.roster = Roster()
        self.news = trio.Event()
        self.is_closed = False
        self._shape = shape

    def join(self, members: Mapping[int, int]) -> None:
        """Note members that serve: incarnation by rank."""
        if self.roster.join(members):
            self._wake()

    def leave(self, ranks: Collection[int], why: Exception) -> None:
        """Note members that do not serve any more."""
        if self.roster.leave(ranks, why):
            self._wake()

    def close(self) -> None:
        """End every reader's views: the mesh has stopped."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = trio.Event()

    def view(self, seen: Mapping[int, int]) -> MembershipView:
        """Return the present view for a reader that has seen something before."""
        shown, whole = self._shape()
        change = self.roster.since(seen)
        return MembershipView(
            epoch=change.epoch,
            extent=shown.extent,
            members=tuple(map(whole.point, sorted(self.roster.present))),
            joined=tuple(map(whole.point, change.joined)),
            left=tuple(
                Departed(point=whole.point(rank), incarnation=number, reason=why) for rank, number, why in change.left
            ),
        )

    def open(self) -> AbstractAsyncContextManager[ViewReader]:
        """Read views while the body runs."""
        return in_trio_block(self._open())

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[ViewReader, None]:
        await trio.lowlevel.checkpoint()
        yield ViewReader(self)
