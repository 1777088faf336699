r"""Membership of a mesh: the incarnation and standing of each rank, as one process knows them.

    LIVE --> RESTARTING --> LIVE of the next incarnation
      \           \-------> GONE --> LIVE (by `replace`, `resize`)
       \--------------------^

The process that owns the mesh decides; all handles in that process share its table. Other processes start with the
table that the handle carried. When a member has ended they query the owner, which replies when the next incarnation
serves, or when there will be none.

MS-1 the incarnation at a rank only grows: older updates are ignored.
MS-3 ranks are never renumbered or removed: one that has left its mesh is GONE, and calls to it raise
     `MembershipChanged`.
MS-2 the wait for a member that is being restarted is bounded only by the caller's scope, the end of the mesh, and a
     restart that waits for the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.calls.invocation import Err, Ok, Request, invoke
from trimesh._runtime.peers.deaths import left
from trimesh._runtime.peers.peer import Peer, Target
from trimesh._runtime.values.endpoint_spec import MemberInfo, MeshInfo
from trimesh.errors import DeadlockError, MeshError, MeshStopped, Origin, place_name
from trimesh.ids import AGENT, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


class Standing(enum.Enum):
    """State of a rank with regard to calls."""

    LIVE = "live"
    RESTARTING = "restarting"
    GONE = "gone"


Place = tuple[int, str, int, int]
"""A `MemberInfo` in a reply of the owner: (process, host, pid, incarnation). The process is 0 if the member has left
the mesh."""


_LIVE: Final = Standing.LIVE  # looked up for each message; class access is slow


class Line:
    """Ordered queue of started calls to one mesh that cannot be sent yet."""

    def __init__(self) -> None:
        self._places: list[object] = []
        self._changed = trio.Event()

    @property
    def is_empty(self) -> bool:
        """True while no call waits."""
        return not self._places

    def join(self) -> object:
        """Append a place and return it."""
        place = object()
        self._places.append(place)
        return place

    def leave(self, place: object) -> None:
        """Remove a place and wake the next one; no effect for a removed place."""
        if place in self._places:
            self._places.remove(place)
            self._changed.set()
            self._changed = trio.Event()

    async def wait_turn(self, place: object) -> None:
        """Wait until a place is first; no checkpoint if it is."""
        while self._places[0] is not place:
            await self._changed.wait()

    async def wait_empty(self) -> None:
        """Wait until no call waits."""
        while self._places:
            await self._changed.wait()


class Membership:
    """Members of one mesh, as this process knows them.

    Attributes:
        info: Current state of the mesh, as sent in references and cited in errors of calls.
        standings: Standing of each rank.
        news: Number of updates of each rank; work that began before the last update may be out of date.
        targets: Cache of `target` by rank, without targets that have ended.
        line: Started calls that could not be sent yet and precede all others; None for none.
    """

    def __init__(self, proc: Proc, info: MeshInfo) -> None:
        self.proc = proc
        self.info = info
        self.standings: list[Standing] = [Standing.LIVE] * len(info.members)
        self.news: list[int] = [0] * len(info.members)
        self.line: Line | None = None
        self._changed = trio.Event()
        self.targets: dict[int, Target] = {}
        self._left: dict[int, Target] = {}

    @property
    def members(self) -> Sequence[MemberInfo]:
        """Latest incarnations, by rank."""
        return self.info.members

    @property
    def is_owned_here(self) -> bool:
        """True if this process owns the mesh and decides."""
        return self.info.owner == self.proc.proc_id

    def peer(self, rank: int) -> Peer:
        """Return the process of a rank's member, alive or dead."""
        return self.proc.peer(self.members[rank].proc_id)

    def target(self, rank: int) -> Target:
        if rank in self._left:
            return self._left[rank]
        found = self.targets.get(rank)
        if found is None or found.peer.death is not None:  # targets that have ended are not cached
            found = self.targets[rank] = Target(self.peer(rank), self.info.mesh)
        return found

    def is_live(self, rank: int) -> bool:
        """Return whether no end of a member is known."""
        return self.standings[rank] is Standing.LIVE and self.peer(rank).death is None

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose end is not known."""
        standings, targets = self.standings, self.targets
        found: list[int] = []
        for rank in ranks:
            if standings[rank] is _LIVE:
                target = targets.get(rank)
                peer = self.peer(rank) if target is None else target.peer
                if peer.death is None:
                    found.append(rank)
        return found

    def is_restarting(self, ranks: Sequence[int]) -> bool:
        """Return whether a call to `ranks` would wait for one of them."""
        return any(self.standings[rank] is Standing.RESTARTING for rank in ranks)

    def may_return(self, rank: int) -> bool:
        """Return whether a dead member may be replaced."""
        if self.is_owned_here:
            return self.standings[rank] is Standing.RESTARTING
        return self.info.is_healing and self.standings[rank] is not Standing.GONE

    def are_lost(self, ranks: Sequence[int]) -> bool:
        """Return whether one of `ranks` has ended for good, as far as is known here."""
        standings = self.standings
        if any(standings[rank] is Standing.GONE for rank in ranks):
            return True
        is_final = not self.is_owned_here and not self.info.is_healing
        return is_final and any(self.peer(rank).death is not None for rank in ranks)

    def ranks_in(self, proc_id: ProcId) -> Sequence[int]:
        return [rank for rank, member in enumerate(self.members) if member.proc_id == proc_id]

    # ---- news ------------------------------------------------------------------------------------------------

    def set(self, rank: int, standing: Standing, member: MemberInfo | None = None) -> None:
        """Apply a decision of the owner; `member` replaces the previous one."""
        if member is not None:
            members = [*self.info.members]
            members[rank] = member
            self.info = msgspec.structs.replace(self.info, members=tuple(members))
        self.targets.pop(rank, None)
        if standing is not Standing.GONE:
            self._left.pop(rank, None)
        self.standings[rank] = standing
        self.news[rank] += 1
        self._changed.set()
        self._changed = trio.Event()

    def leave(self, rank: int) -> None:
        """Record that a member leaves the mesh: later calls are not sent to it."""
        peer = self.peer(rank)
        where = place_name(self.info.name, self.info.whole.point(rank))
        text = f"{where} has left the mesh, which was resized: call the members of `await trimesh.current_view(mesh)`"
        self.set(rank, Standing.GONE)
        self._left[rank] = Target(Peer(peer.proc, peer.proc_id, death=left(text)), self.info.mesh)

    @property
    def present(self) -> Region:
        """Region of the current mesh, without members that have left."""
        whole, first = self.info.whole, self.info.first
        now = whole if first < 0 else whole.resized(whole.base.labels[0], first)
        return now.exclude_ranks(self._left)

    def resized(self, first: int) -> None:
        """Record, as the owner, the current size of the mesh's first dimension."""
        self.info = msgspec.structs.replace(self.info, epoch=self.info.epoch + 1, first=first)

    def extend(self, whole: Region, members: Sequence[MemberInfo], standing: Standing) -> None:
        """Append ranks after the existing ones."""
        count = len(members) - len(self.members)
        self.info = msgspec.structs.replace(self.info, whole=whole, members=(*self.members, *members[-count:]))
        self.standings += [standing] * count
        self.news += [0] * count

    def learn(self, info: MeshInfo) -> None:
        """Merge the state that a handle carried (MS-1)."""
        if len(info.members) > len(self.members):
            self.extend(info.whole, info.members, Standing.LIVE)
        if info.epoch > self.info.epoch:
            self.info = msgspec.structs.replace(self.info, epoch=info.epoch, first=info.first)
        for rank, member in enumerate(info.members):
            if member.incarnation > self.members[rank].incarnation:
                self.set(rank, Standing.LIVE, member)

    # ---- waiting ---------------------------------------------------------------------------------------------

    def join_line(self) -> object:
        """Return a place in the line, for a started call that cannot be sent yet."""
        if self.line is None:
            self.line = Line()
        return self.line.join()

    def leave_line(self, place: object) -> None:
        """Remove a place from the line, so that those behind it proceed."""
        if self.line is not None:
            self.line.leave(place)
            if self.line.is_empty:
                self.line = None

    async def wait_changed(self) -> None:
        """Wait for the next decision of the owner."""
        await self._changed.wait()

    async def settle(self, ranks: Sequence[int]) -> None:
        """Wait until none of `ranks` is being restarted. No checkpoint when none is.

        A member that is gone for good is not waited for: a call to it raises its death.

        Raises:
            DeadlockError: The restart waits for the caller.
        """
        if self.is_owned_here:
            while restarting := [rank for rank in ranks if self.standings[rank] is Standing.RESTARTING]:
                await self._wait_restarted(restarting[0], is_request=False)
        elif self.info.is_healing:
            for rank in ranks:
                if self.peer(rank).death is not None:
                    await self.ask(rank)

    async def _wait_restarted(self, rank: int, *, is_request: bool) -> None:
        """Wait, as the owner, until a member is not being restarted."""
        with self.proc.deadlocks.waiting_for_restart(self.info, rank, is_request=is_request):
            while self.standings[rank] is Standing.RESTARTING:
                await self._changed.wait()

    async def answer(self, rank: int, incarnation: int) -> Place | None:
        """Return, as the owner, the replacement of an incarnation that ended; wait for it. None for none.

        The requester may know of the death before the owner does, so the owner waits for up to
        `limits.REPLACEMENT_SECONDS` to learn of it.

        Raises:
            DeadlockError: The restart waits for the request.
        """
        with trio.move_on_after(limits.REPLACEMENT_SECONDS):
            while self.standings[rank] is Standing.LIVE and self.members[rank].incarnation <= incarnation:
                await self._changed.wait()
        await self._wait_restarted(rank, is_request=True)
        found = self.members[rank]
        if rank in self._left:
            return 0, "", 0, found.incarnation
        if self.standings[rank] is Standing.GONE or found.incarnation <= incarnation:
            return None
        return found.proc_id, found.host, found.pid, found.incarnation

    async def ask_all(self) -> None:
        """Update the state of the mesh from its owner, if that is another process.

        Raises:
            MeshError: The owner has ended or no longer knows the mesh.
        """
        if self.is_owned_here:
            return
        info, owner = self.info, self.proc.peer(self.info.owner)
        assert self.proc.family is not None
        await self.proc.family.connect([owner])
        where = Origin(None, info.name, info.actor)
        request = Request(info.name, "current_info", (info.mesh,), {}, lambda _: where)
        [result] = await invoke(self.proc, [Target(owner, AGENT)], request, fail_fast=False)
        if isinstance(result, Err):
            raise result.error
        if not isinstance(result, Ok) or result.value is None:
            raise MeshStopped(f"{info.name} has been stopped")
        self.learn(result.value)

    async def ask(self, rank: int) -> None:
        """Query the owner for the replacement of a rank's member; wait until it is decided."""
        info, known = self.info, self.members[rank]
        owner = self.proc.peer(info.owner)
        assert self.proc.family is not None
        await self.proc.family.connect([owner])
        args = (info.mesh, rank, known.incarnation)
        request = Request(info.name, "replacement", args, {}, lambda _: self.info.origin(rank))
        try:
            [result] = await invoke(self.proc, [Target(owner, AGENT)], request, fail_fast=False)
        except MeshError:
            return
        if isinstance(result, Err) and isinstance(result.error, DeadlockError):
            raise result.error
        place: Place | None = result.value if isinstance(result, Ok) else None
        if place is None:
            if self.members[rank] == known:
                self.set(rank, Standing.GONE)
        elif place[0] == 0:
            if self.members[rank].incarnation <= place[3]:
                self.leave(rank)
        elif place[3] > self.members[rank].incarnation:
            self.set(rank, Standing.LIVE, MemberInfo(ProcId(place[0]), *place[1:]))


def family_of(proc: Proc) -> ProcId:
    """Return the controller of the program that a process belongs to."""
    root = None if proc.family is None else proc.family.root
    return proc.proc_id if root is None else root


def is_reached(proc: Proc, family: ProcId) -> bool:
    """Return whether meshes of a program can be reached: it is this program, or one it is connected to."""
    return family == family_of(proc) or (proc.family is not None and family in proc.family.neighbours)


def membership_of(proc: Proc, info: MeshInfo) -> Membership:
    """Return a process's table of a mesh, updated with the state that a handle carried.

    Raises:
        RuntimeError: The mesh belongs to another program, whose processes this one cannot reach.
    """
    if not is_reached(proc, info.family):
        raise RuntimeError(
            "a handle works only in the program that spawned the mesh, while its outermost block is open; the handle "
            f"on {info.name!r} came from another program, or from a block that was left: spawn the mesh here, or "
            "publish it there (trimesh.publish_as) and connect from the controller here (trimesh.connect)"
        )
    found = proc.memberships.get(info.mesh)
    if found is None:
        found = proc.memberships[info.mesh] = Membership(proc, info)
    elif not found.is_owned_here:
        found.learn(info)
    return found


def ask_for_replacements(proc: Proc, peer: Peer) -> None:
    """Query replacements of an ended process in meshes that others own, before the next call."""

    @trio.lowlevel.enable_ki_protection
    async def ask(membership: Membership, rank: int) -> None:
        await membership.ask(rank)

    for membership in list(proc.memberships.values()):
        if membership.info.is_healing and not membership.is_owned_here:
            for rank in membership.ranks_in(peer.proc_id):
                with suppress(RuntimeError):  # this process is ending and needs no replacements
                    proc.actors.start_soon(ask, membership, rank)  # links are served for as long as actors run
