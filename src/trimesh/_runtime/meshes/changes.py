"""Changes of a running process mesh by the user: replacement of members, growing and shrinking.

    absent --grow: launched, set up, given actors--> member --shrink: no new calls, stopped--> absent

CH-1 Growing is all or nothing: the new members join the mesh at one moment, when all of them serve.
CH-2 Shrinking is decided at one moment, after which new calls raise `MembershipChanged`; if it is cut short, the
     leaving members end at once, and they have left.
CH-3 One resize at a time; the other ranks stay, and a place that is used again has the next incarnation.
CH-4 Meshes of actors that show every place along the dimension follow; those that are spawned meanwhile catch up.
CH-5 A failure in a new member that is not in the mesh yet, and does not fail the change, is handled right after it.

VW-1 A reader gets the present state and the changes since its last read: a slow one skips numbers but loses no
     change, and only its last read is kept for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import trio

from trimesh import limits
from trimesh._runtime.meshes.actor_members import ActorMembers
from trimesh._runtime.meshes.member import discard
from trimesh._runtime.meshes.proc_members import ProcMembers
from trimesh._runtime.tasks.crossing import in_trio_block, in_trio_taking
from trimesh._supervision.policy import Roster
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MembershipChanged, MeshErrorGroup, MeshStopped, ShapeError, place_name
from trimesh.events import Departed, MembershipView, Started
from trimesh.shape.region import Region


class Changes:
    """Changes of one process mesh."""

    def __init__(self, procs: ProcMembers) -> None:
        self._procs = procs
        self._lock = trio.Lock()
        self._pending: dict[int, list[Callable[[], None]]] = {}

    def defer(self, rank: int, act: Callable[[], None]) -> None:
        """Postpone handling an event of a joining member until it has joined; drop it for a leaving one (CH-5)."""
        if rank in self._pending:
            self._pending[rank].append(act)

    # ---- replace ---------------------------------------------------------------------------------------------

    async def replace(self, ranks: Sequence[int]) -> None:
        """Replace some members, dead or alive, with the actors there; it does not count as a failure.

        Raises:
            MeshErrorGroup: A new member could not be started; none of them is left.
            MembershipChanged: A member has left by a resize.
        """
        procs = self._procs
        await trio.lowlevel.checkpoint()
        with procs.block.entering():
            await procs.wait_settled(ranks)
            if not procs.absent.isdisjoint(ranks):
                raise gone_of(procs, ranks)
            procs.replacing.update(ranks)
            cause = MeshStopped(f"{procs.name}: members are being replaced")
            procs.mark_down(ranks, cause)
            try:
                await procs.end([procs.members[rank] for rank in ranks])
                await procs.follow(ranks)
            except BaseException as error:
                await discard([procs.members[rank] for rank in ranks])
                procs.give_up(ranks, error if isinstance(error, Exception) else cause)
                raise
            finally:
                procs.replacing.difference_update(ranks)
                procs.mark_up(ranks)

    # ---- size ------------------------------------------------------------------------------------------------

    def check(self, label: str, size: int) -> None:
        """Refuse an impossible resize.

        Raises:
            ShapeError: `label` is not the first dimension, or there would be too many processes.
            RuntimeError: The size of this mesh is fixed.
        """
        procs = self._procs
        base = procs.present.base
        if base.axis(label) != 0:
            raise ShapeError(
                f"a mesh can be resized only along its first dimension, got {label!r} for {base!r}: spawn it with "
                f"{label!r} first"
            )
        count = base.nelements // base.size(label) * size
        if count > limits.LINKS_MAX:
            raise ShapeError(
                f"a mesh must not have more than limits.LINKS_MAX ({limits.LINKS_MAX}) processes on a host, got "
                f"{count} for {label}={size}"
            )
        shares = procs.options.shares
        if shares is not None and count > shares.count:
            raise ShapeError(
                f"{procs.name} has {shares.count} reserved places and cannot have more processes, got {count} for "
                f"{label}={size}: raise count= of its Need"
            )
        fixed_by = procs.fixed_by
        if not procs.is_healing:
            fixed_by = "its policy is FailFast, which keeps no recipe for new actors: write supervision=Isolate()"
        elif procs.options.bind is not None:
            fixed_by = "its processes are bound to cores (bind=), which were assigned when it was spawned"
        elif procs.options.rendezvous:
            fixed_by = "its processes have a fixed WORLD_SIZE for torch.distributed (rendezvous=True)"
        if fixed_by:
            raise RuntimeError(f"{procs.name} cannot be resized: {fixed_by}")

    async def resize(self, label: str, size: int) -> Region:
        """Resize the mesh along its first dimension; return it at its new size.

        Raises:
            MeshErrorGroup: A new member or its actors could not be started; all new members have been ended.
            ShapeError, RuntimeError: See `check`.
        """
        procs = self._procs
        await trio.lowlevel.checkpoint()
        with procs.block.entering():
            async with self._lock:
                self.check(label, size)
                shown = procs.present.resized(label, size)
                if len(shown) > len(procs.present):
                    await self._grow(label, shown)
                elif len(shown) < len(procs.present):
                    await self._shrink(shown)
                return procs.present

    async def _grow(self, label: str, shown: Region) -> None:
        procs = self._procs
        ranks = range(len(procs.present), len(shown))
        self._widen(shown, ranks)
        self._pending = {rank: [] for rank in ranks}
        procs.replacing.update(ranks)
        try:
            await procs.launching.launch_next(ranks, "grow")
            while behind := [actors for actors in procs.actors if actors.size.lacks(shown)]:
                await behind[0].size.grow(label, shown)
        except BaseException:
            await discard([procs.members[rank] for rank in ranks])
            for actors in procs.actors:
                actors.size.drop(ranks)
            self._pending = {}
            raise
        finally:
            procs.replacing.difference_update(ranks)
        pending, self._pending = self._pending, {}
        procs.absent.difference_update(ranks)
        procs.present = shown
        procs.note_joined()
        for actors in procs.actors:
            actors.size.note(shown)
        procs.tell_started(Started, ranks)
        for rank in ranks:
            for act in pending[rank]:
                act()

    def _widen(self, shown: Region, ranks: Sequence[int]) -> None:
        """Create places for joining members; places that existed before are used again."""
        procs = self._procs
        procs.absent.update(ranks)
        if len(shown) > len(procs.whole):
            procs.whole = shown
            for member in procs.members:
                member.point = shown.point(member.rank)
            procs.extend_units()
        for rank in range(len(procs.members), len(procs.whole)):
            procs.members.append(procs.new_member(rank, -1))

    async def catch_up(self, actors: ActorMembers) -> None:
        """Spawn a mesh of actors on the members that have joined since its own spawn began (CH-4).

        Raises:
            MeshErrorGroup: Some could not be spawned.
        """
        while actors.size.lacks(shown := self._procs.present):
            try:
                await actors.size.grow(shown.base.labels[0], shown)
            except MeshErrorGroup:
                if self._procs.present == shown:
                    raise

    async def _shrink(self, shown: Region) -> None:
        procs = self._procs
        ranks = list(range(len(shown), len(procs.present)))
        while True:
            for actors in list(procs.actors):
                await actors.ready.wait()
            await procs.wait_settled(ranks)
            if all(actors.ready.is_set() for actors in procs.actors):
                break
        members = [procs.members[rank] for rank in ranks]
        why = MembershipChanged(f"{procs.name} was resized to {dict(shown.extent)!r}")
        procs.absent.update(ranks)
        procs.present = shown
        procs.note_left(ranks, why)
        for member in members:
            member.departs()
        for actors in procs.actors:
            actors.size.leave(ranks)
            actors.size.note(shown)
        try:
            await procs.end(members, by="left")
        except BaseException:
            await discard(members)
            raise
        finally:
            for actors in procs.actors:
                actors.size.drop(ranks)


def gone_of(procs: ProcMembers, ranks: Collection[int]) -> MembershipChanged:
    """Return the error for a view of members of which some have left their mesh."""
    found = sorted(procs.absent.intersection(ranks))
    shown = ", ".join(place_name(procs.name, procs.whole.point(rank)) for rank in found[:8])
    return MembershipChanged(
        f"{procs.name} was resized to {dict(procs.present.extent)!r}, and this view shows members that have left: "
        f"{shown}{', ...' if len(found) > 8 else ''}; use the view that resize returned",
        maybe_executed=False,
    )


# ---- numbered views of one process mesh, published to all readers ----------------------------------------------------


class ViewReader:
    """Views for one reader: `async for view in views`. It ends when the mesh has stopped."""

    def __init__(self, hub: MembershipHub) -> None:
        self._hub = hub
        self._seen: tuple[int, Mapping[int, int]] = (-1, {})
        self._before: tuple[int, Mapping[int, int]] = self._seen

    def __aiter__(self) -> ViewReader:
        return self

    def __anext__(self) -> Awaitable[MembershipView]:
        """Return the present view once it differs from the last one; the first one at once.

        Blocking: a checkpoint, cancellable; a cancel loses no view.

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
        """Read again later: the view has not reached code outside of Trio."""
        self._seen = self._before


class MembershipHub:
    """Record of the members that serve in a mesh, for readers.

    Attributes:
        news: Set at the next change.
        is_closed: Whether the mesh has stopped.
    """

    def __init__(self, shape: Callable[[], tuple[Region, Region]]) -> None:
        """Begin without members.

        Args:
            shape: Returns the mesh as shown now, and all places that it has ever had.
        """
        self.roster = Roster()
        self.news = trio.Event()
        self.is_closed = False
        self._shape = shape

    def join(self, members: Mapping[int, int]) -> None:
        """Record members that serve: incarnation by rank."""
        if self.roster.join(members):
            self._wake()

    def leave(self, ranks: Collection[int], why: Exception) -> None:
        """Record members that no longer serve."""
        if self.roster.leave(ranks, why):
            self._wake()

    def close(self) -> None:
        """End the iteration of all readers: the mesh has stopped."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = trio.Event()

    def view(self, seen: Mapping[int, int]) -> MembershipView:
        """Return the present view for a reader, given the incarnations it has seen."""
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
