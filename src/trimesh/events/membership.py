"""Who is in a mesh of processes: the numbered views that `procs.membership()` yields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trimesh.shape.extent import Extent
    from trimesh.shape.point import Point


@attrs.frozen(kw_only=True)
class Departed:
    """A member that is in a mesh no more.

    Attributes:
        point: Its coordinates.
        incarnation: 0 for the first at this point.
        reason: Why: `MembershipChanged` for one that `resize` has taken out, `MeshStopped` for one that was replaced,
            else the failure by which it has ended, or is being restarted.
    """

    point: Point
    incarnation: int
    reason: Exception


@attrs.frozen(kw_only=True)
class MembershipView:
    """The members of a mesh of processes at one moment, and what has changed since the view before it.

    Points are those of the mesh, so that `exclude` takes them; the rank of a point is never another's.

    Attributes:
        epoch: Number of the last change; it grows, by more than one where the reader was slower than the changes.
        extent: Labels and sizes; places whose member is missing included.
        members: Those that serve.
        joined: Those of them that the view before has not shown, or has shown by another incarnation.
        left: Those that the view before has shown and that do not serve any more, each with the reason.
    """

    epoch: int
    extent: Extent
    members: tuple[Point, ...]
    joined: tuple[Point, ...]
    left: tuple[Departed, ...]
