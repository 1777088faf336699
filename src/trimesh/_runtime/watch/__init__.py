"""Introspection of one process: reports, stacks, stalls, statistics, events."""

from trimesh._runtime.watch.events import EventStream
from trimesh._runtime.watch.progress_view import ShownProgress, progress, showing
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
