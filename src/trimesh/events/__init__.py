"""What happened, as records."""

from trimesh.events.records import (
    Died,
    Event,
    Failed,
    FellSilent,
    GaveUp,
    Lagged,
    MemberEvent,
    Restarted,
    Restarting,
    Stalled,
    Started,
)

__all__ = [
    "Died",
    "Event",
    "Failed",
    "FellSilent",
    "GaveUp",
    "Lagged",
    "MemberEvent",
    "Restarted",
    "Restarting",
    "Stalled",
    "Started",
]
