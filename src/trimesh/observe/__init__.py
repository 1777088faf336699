"""What a run does: which process, which call, who waits for whom, what has happened before.

`await trimesh.observe.snapshot()` tells it of the program itself, `trimesh.observe.runs()` of the running ones of this
user; the command `trimesh` shows the same.
"""

from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    EventRow,
    GrantRow,
    HoldRow,
    HostRow,
    JobRow,
    LinkRow,
    OutputRow,
    PinRow,
    ProcRow,
    PublicationRow,
    WaitRow,
)
from trimesh.observe.activity import ProcActivity, activity_between, calls_of
from trimesh.observe.asking import snapshot, watch
from trimesh.observe.culprit import Cause
from trimesh.observe.examining import Autopsy, DeadProc, LastCall, autopsy
from trimesh.observe.flights import RunRecords, find_records, read_record, read_records
from trimesh.observe.formatting import Coordinates, JsonLogFormatter, LogFormatter
from trimesh.observe.merging import RunSnapshot
from trimesh.observe.prometheus import prometheus_text
from trimesh.observe.publishing import KeptVersions, UnreadVersions, kept_versions, unread_versions
from trimesh.observe.run import DebugTerminal, ObservedRun, find_run, runs
from trimesh.observe.stacks import SharedStack, shared_stacks
from trimesh.observe.timeline import Timeline, trace_bytes
from trimesh.observe.waiting import Culprit, WaitGraph

__all__ = [
    "ActorRow",
    "Autopsy",
    "CallRow",
    "Cause",
    "Coordinates",
    "Culprit",
    "DeadProc",
    "DebugTerminal",
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
    "ObservedRun",
    "OutputRow",
    "PinRow",
    "ProcActivity",
    "ProcRow",
    "PublicationRow",
    "RunRecords",
    "RunSnapshot",
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
    "read_record",
    "read_records",
    "runs",
    "shared_stacks",
    "snapshot",
    "trace_bytes",
    "unread_versions",
    "watch",
]
