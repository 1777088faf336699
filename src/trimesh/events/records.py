"""What happened to the members of a mesh: the records that `mesh.events()` yields.

Points are those of the mesh as spawned; `incarnation` is that of the member that the record is about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from trimesh.errors import RestartLimit

if TYPE_CHECKING:
    from trimesh.shape.point import Point


@attrs.frozen(kw_only=True)
class MemberEvent:
    """Something happened to one member.

    Attributes:
        mesh: Name of the mesh.
        point: Coordinates of the member.
        incarnation: 0 for the first at this point, one more for each restart.
    """

    mesh: str
    point: Point
    incarnation: int


@attrs.frozen(kw_only=True)
class Started(MemberEvent):
    """The member lives: the snapshot with which `events()` begins, or a member that `replace` has started.

    Attributes:
        host: Name of its host.
        pid: Its process, or None if it is not known.
    """

    host: str = ""
    pid: int | None = None


@attrs.frozen(kw_only=True)
class Died(MemberEvent):
    """The member has ended without having been asked to.

    Attributes:
        error: How: a `ProcDied`, say; None for an actor that has ended by itself without an error.
    """

    error: Exception | None


@attrs.frozen(kw_only=True)
class Failed(MemberEvent):
    """A failure without a caller that the member has survived: of a broadcast, say.

    Attributes:
        error: The exception, as it was raised there.
    """

    error: Exception


@attrs.frozen(kw_only=True)
class Unacknowledged(MemberEvent):
    """The member did not acknowledge the cancel of a call in time; it may still run (rule C2).

    Attributes:
        error: An `Unresponsive`.
    """

    error: Exception


@attrs.frozen(kw_only=True)
class Stalled(MemberEvent):
    """The event loop of the member's process has not run for long, though the process lives.

    Attributes:
        seconds: How long.
        stack: Of its main thread, as text.
    """

    seconds: float
    stack: str


@attrs.frozen(kw_only=True)
class Restarting(MemberEvent):
    """The member is down, or is being taken down, and will be started again.

    Attributes:
        cause: The failure that it is due to, which may be another member's.
    """

    cause: Exception


@attrs.frozen(kw_only=True)
class Restarted(MemberEvent):
    """The member serves again; `incarnation` is the new one.

    Attributes:
        host: Name of its host.
        pid: Its process, or None if it is not known.
    """

    host: str = ""
    pid: int | None = None


@attrs.frozen(kw_only=True)
class GaveUp(MemberEvent):
    """The member is not restarted any more.

    Attributes:
        error: The limit that was passed, with every cause.
    """

    error: RestartLimit


@attrs.frozen
class Lagged:
    """The reader was too slow: this many records, of which this one takes the place, are lost to it.

    Attributes:
        count: How many.
    """

    count: int


Event = Started | Died | Failed | Unacknowledged | Stalled | Restarting | Restarted | GaveUp | Lagged
"""Anything that `events()` yields."""


@attrs.frozen(kw_only=True)
class Failure:
    """A failure of members that no call will raise, before the policy of their mesh decides what it does.

    Attributes:
        mesh: Name of the mesh of processes, or of the actors on them, that has failed.
        points: The members, in the extent of that mesh as spawned.
        reason: The error that the policy would raise or heal: `ProcDied`, what a broadcast has raised, `RestartLimit`.
        incarnation: Of the first of the members: 0 for the first one there, one more for each restart.
        has_ended: Whether the members are gone by it; else they live on.
    """

    mesh: str
    points: tuple[Point, ...]
    reason: Exception
    incarnation: int
    has_ended: bool


OnFailure = Callable[[Failure], bool | None]
"""Returns True for a failure that it has handled; for any other the policy of the mesh goes on."""
