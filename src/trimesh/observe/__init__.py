"""Introspection of runs: snapshots of processes and calls, wait graphs, events, post-mortems.

`await trimesh.observe.snapshot()` returns a snapshot of this program; `trimesh.observe.runs()` finds the running
programs of this user. The command `trimesh` shows the same.
"""

from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    EndpointRow,
    EventRow,
    GrantRow,
    HoldRow,
    HostRow,
    JobRow,
    LinkRow,
    MetricRow,
    OutputRow,
    PinRow,
    ProcRow,
    PublicationRow,
    SampleRow,
    WaitRow,
)
from trimesh.observe.formatting import Coordinates, JsonLogFormatter, LogFormatter
from trimesh.observe.history import QueryResult, query
from trimesh.observe.post_mortem import Autopsy, Cause, DeadProc, LastCall, autopsy
from trimesh.observe.prometheus import prometheus_text
from trimesh.observe.run import DebugTerminal, ObservedRun, find_run, runs, snapshot, watch
from trimesh.observe.run_snapshot import (
    ProcActivity,
    RunRecords,
    RunSnapshot,
    SharedStack,
    activity_between,
    calls_of,
    find_records,
    read_record,
    read_records,
    shared_stacks,
)
from trimesh.observe.timeline import Timeline, trace_bytes
from trimesh.observe.waiting import Culprit, KeptVersions, UnreadVersions, WaitGraph, kept_versions, unread_versions

__all__ = [
    "ActorRow",
    "Autopsy",
    "CallRow",
    "Cause",
    "Coordinates",
    "Culprit",
    "DeadProc",
    "DebugTerminal",
    "EndpointRow",
    "EventRow",
    "GrantRow",
    "HoldRow",
    "HostRow",
    "JobRow",
    "JsonLogFormatter",
    "KeptVersions",
    "LastCall",
    "LinkRow",
    "LogFormatter",
    "MetricRow",
    "ObservedRun",
    "OutputRow",
    "PinRow",
    "ProcActivity",
    "ProcRow",
    "PublicationRow",
    "QueryResult",
    "RunRecords",
    "RunSnapshot",
    "SampleRow",
    "SharedStack",
    "Timeline",
    "UnreadVersions",
    "WaitGraph",
    "WaitRow",
    "activity_between",
    "autopsy",
    "calls_of",
    "find_records",
    "find_run",
    "kept_versions",
    "prometheus_text",
    "query",
    "read_record",
    "read_records",
    "runs",
    "shared_stacks",
    "snapshot",
    "trace_bytes",
    "unread_versions",
    "watch",
]
