"""Event records of meshes, membership views, and the buffer of one reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trimesh.errors import RestartLimit

if TYPE_CHECKING:
    from trimesh.shape.extent import Extent, Point


__all__ = [
    "Died",
    "Event",
    "Failed",
    "Failure",
    "GaveUp",
    "Lagged",
    "MemberEvent",
    "OnFailure",
    "Restarted",
    "Restarting",
    "Stalled",
    "Started",
    "Unacknowledged",
]


# ---- what happened to the members of a mesh: the records that `mesh.events()` yields ---------------------------------

# Points are those of the mesh as spawned; `incarnation` is that of the member that the record is about.


class MemberEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of events of one member.

    Attributes:
        mesh: Name of the mesh.
        point: Coordinates of the member.
        incarnation: 0 for the first at this point, one more for each restart.
    """

    mesh: str
    point: Point
    incarnation: int


class Started(MemberEvent, frozen=True, kw_only=True):
    """The member lives: the snapshot with which `events()` begins, or a member that `replace` has started.

    Attributes:
        host: Name of its host.
        pid: Its process, or None if it is not known.
    """

    host: str = ""
    pid: int | None = None


class Died(MemberEvent, frozen=True, kw_only=True):
    """The member ended without being asked to.

    Attributes:
        error: Its cause, such as a `ProcDied`; None for an actor that ended by itself without an error.
    """

    error: Exception | None


class Failed(MemberEvent, frozen=True, kw_only=True):
    """A failure without a caller, such as that of a broadcast, which the member survived.

    Attributes:
        error: The exception, as it was raised there.
    """

    error: Exception


class Unacknowledged(MemberEvent, frozen=True, kw_only=True):
    """The member did not acknowledge the cancel of a call in time; it may still run (rule C2).

    Attributes:
        error: An `Unresponsive`.
    """

    error: Exception


class Stalled(MemberEvent, frozen=True, kw_only=True):
    """The event loop of the member's process has not run for long, though the process lives.

    Attributes:
        seconds: How long.
        stack: Of its main thread, as text.
    """

    seconds: float
    stack: str


class Restarting(MemberEvent, frozen=True, kw_only=True):
    """The member is down, or is being taken down, and will be started again.

    Attributes:
        cause: The failure that led to it, which may be another member's.
    """

    cause: Exception


class Restarted(MemberEvent, frozen=True, kw_only=True):
    """The member serves again; `incarnation` is the new one.

    Attributes:
        host: Name of its host.
        pid: Its process, or None if it is not known.
    """

    host: str = ""
    pid: int | None = None


class GaveUp(MemberEvent, frozen=True, kw_only=True):
    """The member is not restarted any more.

    Attributes:
        error: The limit that was reached, with every cause.
    """

    error: RestartLimit


class Lagged(msgspec.Struct, frozen=True):
    """Replaces the oldest unread records, which a slow reader has lost.

    Attributes:
        count: Number of lost records.
    """

    count: int


Event = Started | Died | Failed | Unacknowledged | Stalled | Restarting | Restarted | GaveUp | Lagged
"""Anything that `events()` yields."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of members that no call will raise, before the policy of their mesh decides what it does.

    Attributes:
        mesh: Name of the mesh of processes, or of the actors on them, that has failed.
        points: The members, in the extent of that mesh as spawned.
        reason: The error that the policy would raise or heal: a `ProcDied`, a `RestartLimit`, the error of a broadcast.
        incarnation: Of the first of the members: 0 for the first one there, one more for each restart.
        has_ended: Whether the members ended by it; else they live on.
    """

    mesh: str
    points: tuple[Point, ...]
    reason: Exception
    incarnation: int
    has_ended: bool


OnFailure = Callable[[Failure], bool | None]
"""Handler that returns True for a failure that it handled; any other failure goes on to the policy of the mesh."""


# ---- who is in a mesh of processes: the numbered views that `procs.membership()` yields ------------------------------


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A member that has left its mesh.

    Attributes:
        point: Its coordinates.
        incarnation: 0 for the first at this point.
        reason: `MembershipChanged` for one that `resize` took out, `MeshStopped` for one that was replaced, else the
            failure by which it ended or is being restarted.
    """

    point: Point
    incarnation: int
    reason: Exception


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a mesh of processes at one moment, and the changes since the previous view.

    Points are those of the mesh, so that `exclude` takes them; the rank of a point is never another's.

    Attributes:
        epoch: Number of the last change; it grows by more than one when the reader was slower than the changes.
        extent: Labels and sizes, including places whose member is missing.
        members: Members that serve.
        joined: Serving members that the previous view did not show, or showed with another incarnation.
        left: Members that the previous view showed and that serve no more, each with the reason.
    """

    epoch: int
    extent: Extent
    members: tuple[Point, ...]
    joined: tuple[Point, ...]
    left: tuple[Departed, ...]


# ---- unread events of one reader: bounded, with a count of the lost ones ---------------------------------------------


class EventBuffer:
    """The newest records for one reader.

    When it is full, the oldest record is dropped: a late reader needs the current state.

    Attributes:
        records_max: Maximum number of records.
        lost: Number of records lost since the reader last took one.
    """

    def __init__(self, records_max: int) -> None:
        self.records_max = records_max
        self.lost = 0
        self._records: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Add the newest record."""
        if len(self._records) >= self.records_max:
            self._records.popleft()
            self.lost += 1
        self._records.append(event)

    def take(self) -> Event | None:
        """Return the oldest record, `Lagged` in place of lost ones, or None when there is none."""
        if self.lost:
            lagged, self.lost = Lagged(self.lost), 0
            return lagged
        return self._records.popleft() if self._records else None

    def __len__(self) -> int:
        return len(self._records) + (1 if self.lost else 0)
