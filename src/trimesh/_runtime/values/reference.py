"""What a handle on a mesh consists of when it travels: numbers and names, no ownership."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimesh.errors import Origin
from trimesh.ids import MeshId, ProcId
from trimesh.shape.region import Region


class MemberInfo(msgspec.Struct, frozen=True):
    """One process incarnation.

    Attributes:
        pid: Process id there.
        incarnation: 0 for the first process at its point.
    """

    proc_id: ProcId
    host: str
    pid: int
    incarnation: int = 0


class MeshInfo(msgspec.Struct, frozen=True):
    """One actor mesh, or the agents of one process mesh, as they are at one moment.

    Attributes:
        mesh: Its number in the family.
        actor: Class name, or None for a process mesh.
        whole: All of it.
        members: By rank.
        owner: The process whose block owns it, which knows who follows a member that has ended.
        is_healing: Whether they may: its policy is not `FailFast`.
        is_shared: Whether other processes of the family may spawn on it, a mesh of processes.
        borrower: The process that has asked the owner for these actors, if it is another one.
        family: The controller of the program that it belongs to; 0 in none, which is refused.
        epoch: How often it has been resized.
        first: Places along its first dimension now, which are the first ones of `whole`; -1 for all of them.
        replaces_all: Whether its policy restarts all members when one fails.
    """

    mesh: MeshId
    name: str
    actor: str | None
    whole: Region
    members: Sequence[MemberInfo]
    owner: ProcId = ProcId(0)
    is_healing: bool = False
    family: ProcId = ProcId(0)
    is_shared: bool = False
    borrower: ProcId = ProcId(0)
    epoch: int = 0
    first: int = -1
    replaces_all: bool = False

    def origin(self, rank: int, endpoint: str | None = None) -> Origin:
        """Return the coordinates of an error of the member of base rank `rank`."""
        member = self.members[rank]
        point = self.whole.point(rank)
        return Origin(point, self.name, self.actor, endpoint, member.host, member.pid or None, member.incarnation)
