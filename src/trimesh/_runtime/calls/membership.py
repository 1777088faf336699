r"""Who lives at each rank of one mesh, as one process knows it.

    LIVE --> RESTARTING --> LIVE of the next incarnation
      \           \-------> GONE --> LIVE (by `replace`, `resize`)
       \--------------------^

The process that owns the mesh decides; its handles, wherever they came from, share its table. Other processes begin
with what travelled in the handle. When the member they know has ended they ask the owner, who answers when the next
incarnation serves, or when there will be none.

MS-1 the incarnation at a rank only grows: news that are older than what is known change nothing.
MS-3 ranks are never renumbered, and never taken away: one that has left its mesh is GONE, and calls to it say so.
MS-2 only the caller's own scope, and the end of the mesh, bound the wait for a member that is being restarted.
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
from trimesh.errors import MeshError, MeshStopped, Origin, place_name
from trimesh.ids import AGENT, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


class Standing(enum.Enum):
    """Whether a rank of a mesh can be called."""

    LIVE = "live"
    RESTARTING = "restarting"
    GONE = "gone"


Place = tuple[int, str, int, int]
"""A `MemberInfo` in an answer of the owner: (process, host, pid, incarnation); the process is 0 for one that has left
the mesh."""


_LIVE: Final = Standing.LIVE  # looked up for each message, and slowly in the class


class Line:
    """Calls to one mesh that were started while they could not be sent, in that order."""

    def __init__(self) -> None:
        self._places: list[object] = []
        self._changed = trio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether none waits."""
        return not self._places

    def join(self) -> object:
        """Return a place at the end."""
        place = object()
        self._places.append(place)
        return place

    def leave(self, place: object) -> None:
        """Let the next one go on; nothing for a place that was left."""
        if place in self._places:
            self._places.remove(place)
            self._changed.set()
            self._changed = trio.Event()

    async def wait_turn(self, place: object) -> None:
        """Wait until a place is the first; no checkpoint when it is."""
        while self._places[0] is not place:
            await self._changed.wait()

    async def wait_empty(self) -> None:
        """Wait until none waits."""
        while self._places:
            await self._changed.wait()


class Membership:
    """The members of one mesh.

    Attributes:
        info: The mesh as it is now: what travels in references, and what the errors of a call cite.
        standings: By rank.
        news: How often something was noted of each rank: what began before the last time may be out of date.
        targets: By rank, those that were asked for and have not ended since; see `target`.
        line: Calls that were started and could not be sent yet, whose turn comes before all others; None for none.
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
        """The latest incarnations, by rank."""
        return self.info.members

    @property
    def is_owned_here(self) -> bool:
        """Whether this process decides."""
        return self.info.owner == self.proc.proc_id

    def peer(self, rank: int) -> Peer:
        """Return the process that the member of a rank lives in, or has lived in."""
        return self.proc.peer(self.members[rank].proc_id)

    def target(self, rank: int) -> Target:
        if rank in self._left:
            return self._left[rank]
        found = self.targets.get(rank)
        if found is None or found.peer.death is not None:  # of those that have ended nothing is kept
            found = self.targets[rank] = Target(self.peer(rank), self.info.mesh)
        return found

    def is_live(self, rank: int) -> bool:
        """Return whether nothing is known of the end of a member."""
        return self.standings[rank] is Standing.LIVE and self.peer(rank).death is None

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` of whose end nothing is known."""
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
        """Return whether a member that does not live may be followed by one that does."""
        if self.is_owned_here:
            return self.standings[rank] is Standing.RESTARTING
        return self.info.is_healing and self.standings[rank] is not Standing.GONE

    def ranks_in(self, proc_id: ProcId) -> Sequence[int]:
        return [rank for rank, member in enumerate(self.members) if member.proc_id == proc_id]

    # ---- news ------------------------------------------------------------------------------------------------

    def set(self, rank: int, standing: Standing, member: MemberInfo | None = None) -> None:
        """Note what the owner has decided; `member` follows the one before."""
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
        """Note that a member leaves the mesh: calls that are made from now on are not sent to it."""
        peer = self.peer(rank)
        where = place_name(self.info.name, self.info.whole.point(rank))
        text = f"{where} has left the mesh, which was resized: trimesh.current_view(mesh) shows who is in it"
        self.set(rank, Standing.GONE)
        self._left[rank] = Target(Peer(peer.proc, peer.proc_id, death=left(text)), self.info.mesh)

    def has_left(self, rank: int) -> bool:
        """Return whether the member of a rank has left the mesh and none has come since."""
        return rank in self._left

    @property
    def present(self) -> Region:
        """The mesh as it is now, without those that have left it."""
        whole, first = self.info.whole, self.info.first
        now = whole if first < 0 else whole.resized(whole.base.labels[0], first)
        return now.exclude_ranks(self._left)

    def resized(self, first: int) -> None:
        """Note, as the owner, how many places along the first dimension are in the mesh now."""
        self.info = msgspec.structs.replace(self.info, epoch=self.info.epoch + 1, first=first)

    def extend(self, whole: Region, members: Sequence[MemberInfo], standing: Standing) -> None:
        """Take more ranks, which come after those that there are."""
        count = len(members) - len(self.members)
        self.info = msgspec.structs.replace(self.info, whole=whole, members=(*self.members, *members[-count:]))
        self.standings += [standing] * count
        self.news += [0] * count

    def learn(self, info: MeshInfo) -> None:
        """Take what has travelled in a handle (MS-1)."""
        if len(info.members) > len(self.members):
            self.extend(info.whole, info.members, Standing.LIVE)
        if info.epoch > self.info.epoch:
            self.info = msgspec.structs.replace(self.info, epoch=info.epoch, first=info.first)
        for rank, member in enumerate(info.members):
            if member.incarnation > self.members[rank].incarnation:
                self.set(rank, Standing.LIVE, member)

    # ---- waiting ---------------------------------------------------------------------------------------------

    def join_line(self) -> object:
        """Return the place of a call that was started and cannot be sent yet."""
        if self.line is None:
            self.line = Line()
        return self.line.join()

    def leave_line(self, place: object) -> None:
        """Let those go on that wait behind a place."""
        if self.line is not None:
            self.line.leave(place)
            if self.line.is_empty:
                self.line = None

    async def settle(self, ranks: Sequence[int]) -> None:
        """Wait until none of `ranks` is being restarted. No checkpoint when none is.

        A member that is gone for good is left as it is: a call to it says how it has ended.
        """
        if self.is_owned_here:
            while self.is_restarting(ranks):
                await self._changed.wait()
        elif self.info.is_healing:
            for rank in ranks:
                if self.peer(rank).death is not None:
                    await self.ask(rank)

    async def answer(self, rank: int, incarnation: int) -> Place | None:
        """Wait, as the owner, for the replacement of an incarnation that the asker knows to be over; None for none.

        The asker may know of the death before the owner does, who therefore waits a while before it calls that wrong.
        """
        with trio.move_on_after(limits.REPLACEMENT_SECONDS):
            while self.standings[rank] is Standing.LIVE and self.members[rank].incarnation <= incarnation:
                await self._changed.wait()
        while self.standings[rank] is Standing.RESTARTING:
            await self._changed.wait()
        found = self.members[rank]
        if rank in self._left:
            return 0, "", 0, found.incarnation
        if self.standings[rank] is Standing.GONE or found.incarnation <= incarnation:
            return None
        return found.proc_id, found.host, found.pid, found.incarnation

    async def ask_all(self) -> None:
        """Learn what the mesh is now; from its owner, if that is another process.

        Raises:
            MeshError: The owner has ended, or does not know the mesh any more.
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
        """Ask the owner which member replaces that of a rank, and wait while that is being decided."""
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
    """Return whether handles on meshes of a program work here: it is this one, or one that this has connected to."""
    return family == family_of(proc) or (proc.family is not None and family in proc.family.neighbours)


def membership_of(proc: Proc, info: MeshInfo) -> Membership:
    """Return what a process knows of a mesh, with what has travelled in a handle added.

    Raises:
        RuntimeError: The mesh belongs to another program, whose processes this one cannot reach.
    """
    if not is_reached(proc, info.family):
        raise RuntimeError(
            f"a handle works in the program whose block has spawned the mesh, and only while its outermost block is "
            f"open; that on {info.name!r} came from another program, or from a block that was left: spawn the mesh "
            "here, or publish it there (trimesh.publish_as) and have the controller here connect (trimesh.connect)"
        )
    found = proc.memberships.get(info.mesh)
    if found is None:
        found = proc.memberships[info.mesh] = Membership(proc, info)
    elif not found.is_owned_here:
        found.learn(info)
    return found


def ask_for_replacements(proc: Proc, peer: Peer) -> None:
    """When a process has ended, find out what replaces it in the meshes that others heal, before the next call."""

    @trio.lowlevel.enable_ki_protection
    async def ask(membership: Membership, rank: int) -> None:
        await membership.ask(rank)

    for membership in list(proc.memberships.values()):
        if membership.info.is_healing and not membership.is_owned_here:
            for rank in membership.ranks_in(peer.proc_id):
                with suppress(RuntimeError):  # this process is ending, and has no use for replacements
                    proc.actors.start_soon(ask, membership, rank)  # links are served for as long as actors run
