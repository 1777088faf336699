"""Updates of the replicas of a pool, such as new weights, that follow its membership (`Pool.each`).

UD-1 While an update stands, requests run only on incarnations of replicas that have had it, or a later one. It stands
  once all that live have had it, those that came back during its round, too.
UD-2 An update that succeeds was called once for each incarnation of a replica: restarted, replaced and new ones get the
     latest update, and no earlier one, before they serve.
UD-3 A replica runs no request of the pool while an update is called for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from trimesh.actor.actor_mesh import incarnations_of, is_lost, is_whole, wait_changed
from trimesh.errors import add_note
from trimesh.plain_numbers import plain_whole

if TYPE_CHECKING:
    from trimesh.service.pool.engine import PoolEngine

Update = Callable[[Any], Awaitable[object]]
"""Updates one replica, given its mesh."""


class Updates:
    """The latest updates of a pool's replicas, and which incarnations have had them.

    Args:
        engine: The pool.
        nursery: Runs updates of replicas that come later; an error of one fails the block of the pool.

    Attributes:
        standing: Number of the update that replicas need to serve, or 0.
    """

    def __init__(self, engine: PoolEngine, nursery: trio.Nursery) -> None:
        self._engine = engine
        self._nursery = nursery
        self._lock = trio.Lock()
        self._latest: Update | None = None  # called for replicas that come now
        self._number = 0  # of the latest one
        self.standing = 0
        self._had: dict[int, tuple[object, int]] = {}  # by index: incarnations of a replica, and the number they have
        self._busy: set[int] = set()
        self._is_watched = False

    async def each(self, update: Update, at_most: int) -> None:
        """See `Pool.each`."""
        at_most = plain_whole(at_most)
        if not isinstance(at_most, int) or at_most < 1:
            raise ValueError(f"at_most must be a number of replicas of at least 1, got {at_most!r}")
        async with self._lock:
            before = self._latest, self._number
            if not self._is_watched:
                self._is_watched = True
                self._nursery.start_soon(self._watch)
            self._latest, self._number = update, self._number + 1
            try:
                await self._roll(at_most)
            except BaseException:
                # Those that have it already keep it: its number is used no more.
                self._latest, self.standing = before[0], min(self.standing, before[1])
                raise
            self.standing = self._number
            self.check()

    def holds_back(self, index: int) -> bool:
        """Return whether a replica must not get a request, as it needs an update first, which begins then."""
        if self._is_fit(index):
            return False
        self._take_out(index)
        return index in self._busy

    def check(self) -> None:
        """Take out of service what needs an update first: replicas that have come, or were restarted."""
        if self.standing:
            for replica in self._engine.dispatcher.replicas:
                if replica.is_member:
                    self.holds_back(replica.index)

    async def _watch(self) -> None:
        while True:
            await wait_changed(self._engine.mesh)
            self.check()

    def _is_fit(self, index: int) -> bool:
        view = self._engine.views[index]
        incarnations, number = self._had.get(index, (None, 0))
        return number >= self.standing and incarnations == incarnations_of(view) and is_whole(view)

    # ---- replicas that come later ----------------------------------------------------------------------------

    def _take_out(self, index: int) -> None:
        if index in self._busy or is_lost(self._engine.views[index]):
            return  # a request to one that is lost raises its death
        self._set_busy(index, is_busy=True)
        self._nursery.start_soon(self._bring, index)

    async def _bring(self, index: int) -> None:
        """Update a replica once it lives and is idle, and let it serve."""
        view = self._engine.views[index]
        replica = self._engine.dispatcher.replicas[index]
        try:
            while replica.is_member and not is_lost(view) and not self._is_fit(index):
                if is_whole(view):
                    await self._update(index)
                else:
                    await wait_changed(view)
        except Exception as error:
            add_note(error, f"raised by an update of pool.each, for replica {index}, which has come back or is new")
            raise
        finally:
            self._set_busy(index, is_busy=False)

    # ---- a round over all ------------------------------------------------------------------------------------

    async def _roll(self, at_most: int) -> None:
        """Update all replicas that live, at most so many at a time; then those that have come back meanwhile."""
        await trio.lowlevel.checkpoint()
        seen = set[tuple[int, object]]()
        errors: list[Exception] = []
        room = trio.Semaphore(at_most)

        async def turn(index: int) -> None:
            try:
                await self._turn(index)
            except Exception as error:  # noqa: BLE001 - raised below, bare
                errors.append(error)
                nursery.cancel_scope.cancel(reason="an update of pool.each has failed")
            room.release()

        while not errors:
            behind = [one for one in self._behind() if one not in seen]
            if not behind:
                if not self._has_held_requests():
                    break
                await wait_changed(self._engine.mesh)
                continue
            seen.update(behind)
            async with trio.open_nursery() as nursery:
                for index, _ in behind:
                    await room.acquire()
                    nursery.start_soon(turn, index)
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("updates of pool.each have failed", errors)

    def _behind(self) -> list[tuple[int, object]]:
        """Return the replicas in service that lack the latest update, with their incarnations."""
        members = [one.index for one in self._engine.dispatcher.replicas if one.is_member]
        return [
            (index, incarnations_of(self._engine.views[index]))
            for index in members
            if index not in self._busy and self._lacks(index)
        ]

    def _lacks(self, index: int) -> bool:
        """Return whether a replica lives, and has not had the latest update."""
        view = self._engine.views[index]
        incarnations, number = self._had.get(index, (None, 0))
        return is_whole(view) and (number < self._number or incarnations != incarnations_of(view))

    def _has_held_requests(self) -> bool:
        """Return whether requests wait for the restart of their replica: they begin before it could get an update."""
        return any(
            one.is_member and one.running and one.index not in self._busy and self._is_restarting(one.index)
            for one in self._engine.dispatcher.replicas
        )

    def _is_restarting(self, index: int) -> bool:
        view = self._engine.views[index]
        return not is_whole(view) and not is_lost(view)

    async def _turn(self, index: int) -> None:
        if index not in self._busy and self._lacks(index):
            self._set_busy(index, is_busy=True)
            try:
                await self._update(index)
            finally:
                self._set_busy(index, is_busy=False)

    # ---- one replica -----------------------------------------------------------------------------------------

    async def _update(self, index: int) -> None:
        """Call the latest update for a replica that is out of service; note that it has it, unless it died meanwhile.

        Raises:
            Exception: The update raised it, not because of the replica's end.
        """
        engine, view = self._engine, self._engine.views[index]
        replica = engine.dispatcher.replicas[index]
        await engine.wait_until(lambda: not replica.running or not replica.is_member)
        if not replica.is_member or not is_whole(view):
            return
        update, number, incarnations = self._latest, self._number, incarnations_of(view)
        assert update is not None
        try:
            await update(view)
        except Exception:
            if replica.is_absent or not is_whole(view) or incarnations != incarnations_of(view):
                return  # its end, which is handled elsewhere
            raise
        self._had[index] = incarnations, number

    def _set_busy(self, index: int, *, is_busy: bool) -> None:
        (self._busy.add if is_busy else self._busy.discard)(index)
        self._engine.dispatcher.set_behind(index, is_behind=is_busy)
        self._engine.pump()
