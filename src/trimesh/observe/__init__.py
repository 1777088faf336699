"""What a run does: which process, which call, who waits for whom, what has happened before.

`await trimesh.observe.snapshot()` tells it of the program itself, `trimesh.observe.runs()` of the running ones of this
user; the command `trimesh` shows the same.
"""

from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    EventRow,
    GrantRow,
    HostRow,
    JobRow,
    LinkRow,
    OutputRow,
    ProcRow,
    PublicationRow,
    WaitRow,
)
from trimesh.observe.asking import snapshot, watch
from trimesh.observe.culprit import Cause
from trimesh.observe.examining import Autopsy, DeadProc, LastCall, autopsy
from trimesh.observe.formatting import Coordinates, JsonLogFormatter, LogFormatter
from trimesh.observe.merging import RunSnapshot
from trimesh.observe.prometheus import prometheus_text
from trimesh.observe.run import ObservedRun, find_run, runs
from trimesh.observe.stacks import SharedStack, shared_stacks
from trimesh.observe.waiting import Culprit, WaitGraph

__all__ = [
    "ActorRow",
    "Autopsy",
    "CallRow",
    "Cause",
    "Coordinates",
    "Culprit",
    "DeadProc",
    "EventRow",
    "GrantRow",
    "HostRow",
    "JobRow",
    "JsonLogFormatter",
    "LastCall",
    "LinkRow",
    "LogFormatter",
    "ObservedRun",
    "OutputRow",
    "ProcRow",
    "PublicationRow",
    "RunSnapshot",
    "SharedStack",
    "WaitGraph",
    "WaitRow",
    "autopsy",
    "find_run",
    "prometheus_text",
    "runs",
    "shared_stacks",
    "snapshot",
    "watch",
]
