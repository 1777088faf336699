"""Blocking meshes for plain scripts and notebooks: the names and errors of `trimesh`, without `await`.

`with trimesh.blocking.spawn_procs({"gpus": 4}) as procs:` starts Trio in a thread of its own. Each call waits for its
result, or returns a future (`.submit`). Ctrl-C cancels the waiting call, on the remote side, too.
"""

from trimesh.blocking.calls import (
    Endpoint,
    EventStream,
    MembershipViews,
    Port,
    RDMABuffer,
    Receiver,
    Verb,
    open_channel,
    run,
)
from trimesh.blocking.meshes import (
    ActorMesh,
    HostMesh,
    ProcMesh,
    Spawning,
    connect,
    current_view,
    face,
    log_to,
    publish_as,
    this_host,
    this_proc,
)
from trimesh.blocking.work import CallFuture, Cancelled, TimeLimit, enter, fail_after, move_on_after

__all__ = [
    "ActorMesh",
    "CallFuture",
    "Cancelled",
    "Endpoint",
    "EventStream",
    "HostMesh",
    "MembershipViews",
    "Port",
    "ProcMesh",
    "RDMABuffer",
    "Receiver",
    "Spawning",
    "TimeLimit",
    "Verb",
    "connect",
    "current_view",
    "enter",
    "face",
    "fail_after",
    "log_to",
    "move_on_after",
    "open_channel",
    "publish_as",
    "run",
    "spawn_procs",
    "this_host",
    "this_proc",
]

spawn_procs = this_host().spawn_procs
"""See `HostMesh.spawn_procs`."""
