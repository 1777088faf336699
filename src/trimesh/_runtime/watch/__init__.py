"""What a process tells of itself: reports, stacks, stalls, statistics, events."""

from trimesh._runtime.watch.event_hub import EventStream
from trimesh._runtime.watch.shown_progress import ShownProgress, progress, showing
from trimesh._runtime.watch.statistics import (
    MailboxStatistics,
    MemberStatistics,
    MeshStatistics,
    SeenMember,
    statistics_of,
)

__all__ = [
    "EventStream",
    "MailboxStatistics",
    "MemberStatistics",
    "MeshStatistics",
    "SeenMember",
    "ShownProgress",
    "progress",
    "showing",
    "statistics_of",
]
