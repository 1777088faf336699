"""Statistics of meshes, links and mailboxes as known in this process, as frozen records; no process is queried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from trimesh._transport.interface import LinkStatistics
from trimesh.ids import MeshId
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.actors.mailbox import Mailbox
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class MailboxStatistics(msgspec.Struct, frozen=True):
    """The mailbox of one actor, in its own process.

    Attributes:
        calls_queued: Accepted calls that wait for a slot.
        calls_running: Calls that run.
    """

    calls_queued: int
    calls_running: int


class MemberStatistics(msgspec.Struct, frozen=True):
    """One member of a mesh, as this process sees it.

    Attributes:
        point: Its coordinates in the queried view.
        pid: Process id on its host; None while it has no process, during a restart.
        incarnation: 0 for the first at its point, one more for each restart.
        is_alive: Whether no end of it is known here.
        calls_unended: Calls sent to it by this process that have not ended, including abandoned ones.
        calls_waiting: Calls and broadcasts of this process that wait here for room in its mailbox.
        mailbox: Its mailbox if the actor is in this process, else None.
        link: Counters of the link between this process and its process since the link was opened; None without a link,
            and for this process itself.
        stalled_seconds: Seconds for which its Trio loop has not run; 0.0 while it runs, and for processes that this
            one does not own.
        stalls: Number of stalls so far.
    """

    point: Point
    pid: int | None
    incarnation: int
    is_alive: bool
    calls_unended: int
    calls_waiting: int
    mailbox: MailboxStatistics | None
    link: LinkStatistics | None
    stalled_seconds: float
    stalls: int


class MeshStatistics(msgspec.Struct, frozen=True):
    """A mesh, or a view of one, as this process sees it.

    Attributes:
        name: Name of the mesh.
        members: In view order.
        replies_dropped: Replies to this process, from all meshes, that arrived after their call was abandoned.
    """

    name: str
    members: Sequence[MemberStatistics]
    replies_dropped: int

    @property
    def calls_unended(self) -> int:
        """Calls sent to the members by this process that have not ended."""
        return sum(member.calls_unended for member in self.members)

    @property
    def calls_waiting(self) -> int:
        """Calls and broadcasts of this process that wait here for room."""
        return sum(member.calls_waiting for member in self.members)


class SeenMember(msgspec.Struct, frozen=True):
    """A member to be summarised.

    Attributes:
        pid: As `MemberInfo` has it: 0 for none.
        incarnation, is_alive: As `MemberStatistics` has them.
    """

    point: Point
    peer: Peer
    pid: int
    incarnation: int
    is_alive: bool


def statistics_of(proc: Proc, name: str, mesh: MeshId, seen: Iterable[SeenMember]) -> MeshStatistics:
    return MeshStatistics(name, tuple(_member(proc, mesh, one) for one in seen), proc.dropped_replies)


def _member(proc: Proc, mesh: MeshId, seen: SeenMember) -> MemberStatistics:
    peer = seen.peer
    is_here = peer is proc.me
    box = peer.find_outbox(mesh)
    cell = proc.cells.get(mesh) if is_here else None
    stall = proc.members[peer.proc_id].stall if peer.proc_id in proc.members else None
    return MemberStatistics(
        point=seen.point,
        pid=seen.pid or None,  # 0 is what os.kill takes for the whole process group
        incarnation=seen.incarnation,
        is_alive=seen.is_alive,
        calls_unended=0 if box is None else box.load,
        calls_waiting=0 if box is None else box.waiting,
        mailbox=None if cell is None else _mailbox(cell.mailbox),
        link=None if is_here or peer.link is None else peer.link.statistics(),
        stalled_seconds=0.0 if stall is None else stall.seconds,
        stalls=0 if stall is None else stall.count,
    )


def _mailbox(mailbox: Mailbox) -> MailboxStatistics:
    return MailboxStatistics(sum(1 for _ in mailbox.queued()), sum(1 for _ in mailbox.running()))
