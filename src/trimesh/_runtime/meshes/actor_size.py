"""How an actor mesh follows the size of the mesh of processes that it lives in.

AZ-1 it follows when it was spawned on a view that shows every place along the dimension: then new processes get its
     actors, from what the first ones were made from. Any other mesh only loses members.
AZ-2 ranks are never taken away; those that are not in the mesh are `absent`, and no message is sent to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from trimesh._runtime.calls.membership import Standing
from trimesh.events import Started
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.meshes.actor_members import ActorMembers


UnitsIn = Callable[[Region, Sequence[int]], Sequence[Sequence[int]]]
"""Returns the members of a mesh that are restarted together, from all of it and the rank of each one's process."""


def no_units(whole: Region, proc_ranks: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return none: of a mesh whose policy restarts nothing."""
    del whole, proc_ranks
    return ()


class ActorSize:
    """The size of one actor mesh.

    Attributes:
        absent: Ranks that are not in the mesh: they have left it.
    """

    def __init__(self, actors: ActorMembers, units: UnitsIn, view: Region | None) -> None:
        """Begin with the members as spawned.

        Args:
            units: Those that are restarted together.
            view: The view of the processes that they were spawned on, with which they grow; None if they do not.
        """
        self.absent: set[int] = set()
        self._actors = actors
        self._units = units
        self._view = view

    @property
    def present(self) -> Region:
        """The mesh as it is now."""
        return self._actors.membership.present

    def note(self, shown: Region) -> None:
        """Let handles follow what the mesh of processes is now, if this one does."""
        if self._view is not None and self._actors.is_ready:
            self._actors.membership.resized(shown.base.sizes[0])

    def lacks(self, shown: Region) -> bool:
        """Return whether processes of a mesh that this one follows have not got its actors yet."""
        actors, view = self._actors, self._view
        if view is None or actors.is_stopping or not actors.is_ready:
            return False
        if shown.base.sizes[0] > view.base.sizes[0]:
            return True
        return any(
            rank not in actors.ranks and actors.proc_ranks[rank] in shown
            for rank in actors.membership.info.whole.ranks()
        )

    async def grow(self, label: str, shown: Region) -> None:
        """Make members in the processes that lack them.

        Raises:
            MeshErrorGroup: Some could not be made.
        """
        actors, view, size = self._actors, self._view, shown.base.sizes[0]
        assert actors.processes is not None
        assert view is not None
        if size > view.base.sizes[0]:
            self._view = view.resized(label, size)
            actors.proc_ranks = self._view.table
            members = [actors.processes.member_info(rank) for rank in actors.proc_ranks]
            infos = [msgspec.structs.replace(member, incarnation=-1) for member in members]
            actors.membership.extend(actors.membership.info.whole.resized(label, size), infos, Standing.GONE)
            if actors.restarts is not None:
                actors.restarts.supervisor.extend(self._units(actors.membership.info.whole, actors.proc_ranks))
        every = actors.membership.info.whole.ranks()
        ranks = [rank for rank in every if rank not in actors.ranks and actors.proc_ranks[rank] in shown]
        actors.ranks = sorted([*actors.ranks, *ranks])
        self.absent.difference_update(ranks)
        await actors.remake({rank: actors.processes.member_info(actors.proc_ranks[rank]) for rank in ranks}, Started)

    def leave(self, proc_ranks: Collection[int]) -> None:
        """Send nothing more to the members in some processes, which are taken out of their mesh."""
        actors = self._actors
        for rank in self._ranks_of(proc_ranks):
            if actors.restarts is not None:
                actors.restarts.supervisor.leave(rank)
            self.absent.add(rank)
            actors.membership.leave(rank)

    def drop(self, proc_ranks: Collection[int]) -> None:
        """Forget the members in some processes, which have ended."""
        self.leave(proc_ranks)
        self._actors.ranks = [rank for rank in self._actors.ranks if rank not in self.absent]

    def _ranks_of(self, proc_ranks: Collection[int]) -> list[int]:
        actors = self._actors
        return [rank for rank in actors.ranks if actors.proc_ranks[rank] in proc_ranks]
