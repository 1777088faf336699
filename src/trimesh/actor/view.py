"""State behind a mesh handle: the mesh, the selected region and, at the owner, control over the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from trimesh._runtime.calls import Membership, Standing, is_reached, membership_of
from trimesh._runtime.life import current_proc, find_proc, find_proc_anywhere
from trimesh._runtime.peers import Peer, Target
from trimesh._runtime.tasks import in_trio_now
from trimesh._runtime.values import EndpointSpec, MeshInfo
from trimesh._runtime.watch import MeshStatistics, SeenMember, statistics_of
from trimesh._wire.messages import sent_view
from trimesh.errors import MeshStopped
from trimesh.ids import AGENT, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life import OwnedProcs, Proc

_LIVE: Final = Standing.LIVE  # looked up for each message, and slowly in the class
_STALLED_LOAD: Final = 1 << 32
"""Load added to a stalled member: more than any other member has."""


class Stoppable(Protocol):
    """Owner's side of a mesh."""

    @property
    def is_stopping(self) -> bool:
        """True once its block has begun to stop."""
        ...


Addressees: TypeAlias = "tuple[Proc, MeshInfo, Sequence[Target]]"
"""Receivers of a message: the sending process, the current mesh, and members of it."""


class MeshView:
    """A mesh, or a part of one.

    Attributes:
        info: The mesh as spawned.
        region: Selected members.
        ranks: Base ranks of the region, in view order.
        sent: View as stated in messages; None for the mesh as spawned.
        endpoints: Endpoints by name.
        owner: The owner's side, or None for a reference.
        turn: Next member of `choose` among equally loaded ones; shared by all views of a handle.
        known: Membership table, once it was requested; shared by all views of a handle.
    """

    __slots__ = ("endpoints", "info", "known", "owner", "ranks", "region", "sent", "turn")

    def __init__(
        self,
        info: MeshInfo,
        region: Region,
        endpoints: Mapping[str, EndpointSpec],
        owner: Stoppable | None = None,
        turn: list[int] | None = None,
        known: dict[ProcId, Membership] | None = None,
    ) -> None:
        self.info = info
        self.region = region
        self.ranks: Final = region.ranks()
        self.sent: Final = sent_view(region)
        self.endpoints = endpoints
        self.owner = owner
        self.turn = [0] if turn is None else turn
        self.known = dict[ProcId, Membership]() if known is None else known

    @property
    def name(self) -> str:
        return self.info.name

    def proc(self) -> Proc:
        """Return the process that the running task belongs to, to send a message from it.

        Raises:
            MeshStopped: The block that owns the mesh has begun to stop.
            RuntimeError: There is no process yet.
        """
        self.check_open()
        return current_proc()

    @property
    def is_open(self) -> bool:
        """True until the owning block begins to stop; after that no messages may be sent."""
        return self.owner is None or not self.owner.is_stopping

    def check_open(self) -> None:
        """Check that the owning block has not begun to stop.

        Raises:
            MeshStopped: It has.
        """
        if not self.is_open:
            raise MeshStopped(self.closed_text)

    @property
    def closed_text(self) -> str:
        """Reason why no messages may be sent once the mesh is closed."""
        return f"{self!r} takes no messages: the block that owns it is being left, or has been; call it in that block"

    def targets(self, ranks: Sequence[int]) -> Addressees | None:
        """Return the members of `ranks` as receivers if a message can be sent to all of them now.

        None: the mesh is not open, a member is not alive or not linked, or earlier started calls wait to be sent; then
        use `reach`.
        """
        owner = self.owner
        if owner is not None and owner.is_stopping:
            return None
        proc = current_proc()
        membership = self.known.get(proc.proc_id) or self.membership(proc)
        if membership.line is not None:
            return None
        standings, known = membership.standings, membership.targets
        targets: list[Target] = []
        for rank in ranks:
            target = known.get(rank) or membership.target(rank)
            if target.peer.link is None or standings[rank] is not _LIVE:
                return None
            targets.append(target)
        return proc, membership.info, targets

    def any_targets(self, proc: Proc, ranks: Sequence[int]) -> Addressees:
        """Return the members of `ranks`, also those that are not alive or not linked."""
        membership = self.membership(proc)
        return proc, membership.info, [membership.target(rank) for rank in ranks]

    async def reach(self, ranks: Sequence[int], place: object = None) -> Addressees:
        """Wait until no member of `ranks` is being restarted, and all have a link or are gone for good; return them.

        Args:
            ranks: Base ranks of the members.
            place: The caller's place among started calls that wait to be sent; None waits for all of them.
        """
        proc = current_proc()
        await self._settle(proc, ranks, place)
        return self.any_targets(proc, ranks)

    def membership(self, proc: Proc) -> Membership:
        """Return the membership table of the mesh in `proc`.

        Raises:
            RuntimeError: The handle came from another program.
        """
        found = self.known.get(proc.proc_id)
        if found is None:
            found = self.known[proc.proc_id] = membership_of(proc, self.info)
        return found

    @property
    def current(self) -> MeshInfo:
        """Current mesh, as far as is known here."""
        proc = find_proc_anywhere()
        is_known = proc is not None and is_reached(proc, self.info.family)
        return self.membership(proc).info if proc is not None and is_known else self.info

    async def _settle(self, proc: Proc, ranks: Sequence[int], place: object) -> None:
        membership = self.membership(proc)
        if membership.line is not None:
            await (membership.line.wait_empty() if place is None else membership.line.wait_turn(place))
        tried: set[Peer] = set()
        while True:  # members may be replaced during each wait
            await membership.settle(ranks)
            strangers = _strangers(proc, membership, ranks)
            if tried.issuperset(strangers):  # the rest cannot be linked to now; their `no_link` has the reason
                return
            assert proc.family is not None
            await proc.family.try_to_connect([peer for peer in strangers if peer not in tried])
            tried.update(strangers)

    async def meet(self, ranks: Sequence[int]) -> Sequence[int]:
        """Try to link to members that this process has not met; return the ranks of the view whose end is not known."""
        proc = current_proc()
        membership = self.membership(proc)
        if strangers := _strangers(proc, membership, ranks):
            assert proc.family is not None
            await proc.family.try_to_connect(strangers)
        return membership.living(self.ranks)

    def candidates(self, proc: Proc, ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks that `choose` may take: live ones, or else those that are being restarted."""
        membership = self.membership(proc)
        living = membership.living(ranks)
        return living or [rank for rank in ranks if membership.may_return(rank)]

    def followed(self) -> MeshView:
        """Return the same view of the current mesh, as far as that is known here."""
        proc = find_proc()
        return self if proc is None else self.seen(self.region.following(self.membership(proc).present))

    def alive(self) -> MeshView:
        """Return the view without the members whose end is known here."""
        return in_trio_now(self._alive)()

    def _alive(self) -> MeshView:
        proc = find_proc()
        if proc is None:
            return self.seen(self.region.exclude_ranks(self.ranks))  # no block is open, so nothing lives
        membership = self.membership(proc)
        return self.seen(self.region.exclude_ranks(rank for rank in self.ranks if not membership.is_live(rank)))

    def is_whole(self) -> bool:
        """Return whether no end of a member is known here."""
        proc, ranks = find_proc(), self.ranks
        return proc is not None and len(self.membership(proc).living(ranks)) == len(ranks)

    def states(self) -> Sequence[str]:
        """Return the state of each member as far as it is known here; see `states_of`."""
        proc = find_proc_anywhere()
        if proc is None:
            return ["ended"] * len(self.ranks)
        membership = self.membership(proc)
        return states_of(in_trio_now(self.statistics)(), [membership.is_restarting([rank]) for rank in self.ranks])

    def statistics(self) -> MeshStatistics:
        """Return counts of the members in the region, as far as this process knows them.

        Raises:
            RuntimeError: No mesh is open in this Trio run.
        """
        proc = current_proc()
        membership = self.membership(proc)
        infos = membership.members
        seen = [
            SeenMember(point, membership.peer(rank), infos[rank].pid, infos[rank].incarnation, membership.is_live(rank))
            for point, rank in zip(self.region.points(), self.ranks, strict=True)
        ]
        return statistics_of(proc, self.name, self.info.mesh, seen)

    def least_loaded(self, proc: Proc, ranks: Sequence[int]) -> int:
        """Return the rank with the fewest unended calls of this process; among equals, the next in turn.

        Abandoned calls count until their end is known. Stalled members come last.
        """
        if len(ranks) == 1:
            self.turn[0] = ranks[0] + 1
            return ranks[0]
        membership = self.membership(proc)
        candidates: list[int] = []
        least = 0
        for rank in ranks:
            target = membership.target(rank)
            peer = target.peer
            box = peer.find_outbox(target.mesh)
            load = (0 if box is None else box.load) + (_STALLED_LOAD if peer.is_stalled else 0)
            if load < least or not candidates:
                least, candidates = load, [rank]
            elif load == least:
                candidates.append(rank)
        chosen = next((rank for rank in candidates if rank >= self.turn[0]), candidates[0])
        self.turn[0] = chosen + 1
        return chosen

    def seen(self, region: Region) -> MeshView:
        """Return another part of the same mesh."""
        return MeshView(self.info, region, self.endpoints, self.owner, self.turn, self.known)

    def __repr__(self) -> str:
        from trimesh.shape.value_mesh import view_name  # noqa: PLC0415 - for people only

        return view_name(self.info.name, self.info.whole, self.region)


def _strangers(proc: Proc, membership: Membership, ranks: Sequence[int]) -> list[Peer]:
    """Return the members of `ranks` that this process has not met."""
    return [peer for rank in ranks for peer in [membership.peer(rank)] if proc.is_stranger(peer)]


def statistics_of_procs(name: str, owned: OwnedProcs | None, shown: Region) -> MeshStatistics:
    """Return counts of the processes of a view; see `ProcMesh.statistics`."""
    proc = current_proc()
    members = None if owned is None else owned.members
    if members is None:
        seen = [SeenMember(point, proc.me, proc.pid, 0, is_alive=True) for point in shown.points()]
    else:
        seen = [
            SeenMember(point, one.peer, one.pid, one.incarnation, members.is_live(rank))
            for point, rank in zip(shown.points(), shown.ranks(), strict=True)
            for one in [members.members[rank]]
        ]
    return statistics_of(proc, name, AGENT, seen)


def states_of(statistics: MeshStatistics, is_restarting: Sequence[bool]) -> Sequence[str]:
    """Return the state of each member, for people: "live", "stalled for 3 s", "restarting" or "ended"."""
    return [
        (f"stalled for {one.stalled_seconds:.0f} s" if one.stalled_seconds else "live")
        if one.is_alive
        else ("restarting" if restarts else "ended")
        for one, restarts in zip(statistics.members, is_restarting, strict=True)
    ]
