"""What happened, as records."""

from trimesh.events.records import (
    Died,
    Event,
    Failed,
    Failure,
    FailureHandler,
    GaveUp,
    Lagged,
    MemberEvent,
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
    "FailureHandler",
    "GaveUp",
    "Lagged",
    "MemberEvent",
    "Restarted",
    "Restarting",
    "Stalled",
    "Started",
    "Unacknowledged",
]
