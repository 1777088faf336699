"""Introspection of one process: reports, stacks, stalls, statistics, events."""

from trimesh._runtime.watch.events import EventStream
from trimesh._runtime.watch.progress_view import JupyterOutput, ShownProgress, is_notebook, progress, showing
from trimesh._runtime.watch.statistics import (
    MailboxStatistics,
    MemberStatistics,
    MeshStatistics,
    SeenMember,
    statistics_of,
)

__all__ = [
    "EventStream",
    "JupyterOutput",
    "MailboxStatistics",
    "MemberStatistics",
    "MeshStatistics",
    "SeenMember",
    "ShownProgress",
    "is_notebook",
    "progress",
    "showing",
    "statistics_of",
]
