"""What happened, as records."""

from trimesh.events.records import (
    Died,
    Event,
    Failed,
    Failure,
    GaveUp,
    Lagged,
    MemberEvent,
    OnFailure,
    Restarted,
    Restarting,
    Stalled,
    Started,
    Unacknowledged,
)

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
