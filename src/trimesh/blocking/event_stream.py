"""What happens to a mesh, read by a thread."""

from __future__ import annotations

from trimesh.blocking.work import Each
from trimesh.events.membership import MembershipView
from trimesh.events.records import Event


class EventStream(Each[Event]):
    """What one reader reads: `for event in events`. It ends when the mesh has stopped."""


class MembershipViews(Each[MembershipView]):
    """Who is in a mesh, as one reader reads it: `for view in views`. It ends when the mesh has stopped."""
