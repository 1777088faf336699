"""Actors and tensors over many processes, with Trio's promises kept across all of them.

`async with this_host().spawn_procs({"gpus": 4}) as procs:` owns four processes; `await procs.spawn("name", Cls)` puts
an actor into each; `await actors.endpoint.call(...)` runs on all of them. A failure is raised by the block that owns
the failed process or actor, as an exception group with coordinates. Cancelling a call cancels the remote endpoint.
Leaving a block ends everything in it.
"""

import dis
import importlib
import sys
from typing import TYPE_CHECKING, Any

from trimesh._assembly import assemble as _assemble
from trimesh._runtime.actors import Reply, current_point, current_rank, current_size
from trimesh._runtime.channels import Port, Receiver
from trimesh._runtime.life import dump
from trimesh._runtime.system import run_process
from trimesh._runtime.tasks import cancel_on
from trimesh._runtime.watch import MailboxStatistics, MemberStatistics, MeshStatistics, progress
from trimesh._supervision.policy import Backoff, FailFast, Isolate, Restart
from trimesh._transport.interface import LinkStatistics
from trimesh._wire.pickled.by_value import by_value
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.channel import open_channel
from trimesh.actor.context import Context, context
from trimesh.actor.endpoint import Endpoint, endpoint
from trimesh.actor.host_mesh import HostMesh, this_host, this_proc
from trimesh.actor.options import Retry, per_rank
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.started import StartedCall
from trimesh.actor.verbs import Outcome
from trimesh.config import configured
from trimesh.errors import (
    ActorFailed,
    CollectiveFailed,
    ConfigError,
    ConnectError,
    ConnectionLost,
    DeadlockError,
    DeviceMeshError,
    HostLost,
    HostRefused,
    LimitExceeded,
    LinkLost,
    MembershipChanged,
    MeshError,
    MeshErrorGroup,
    MeshStopped,
    Origin,
    Overloaded,
    PayloadError,
    ProcDied,
    ProtocolError,
    RemoteCancelled,
    RemoteError,
    RemoteTraceback,
    RestartLimit,
    ShapeError,
    SpawnError,
    TrimeshError,
    TrimeshInternalError,
    Unresponsive,
    coords,
    leaves,
    origin,
)
from trimesh.events import (
    Died,
    Failed,
    Failure,
    GaveUp,
    Lagged,
    Restarted,
    Restarting,
    Stalled,
    Started,
    Unacknowledged,
)
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh

_assemble()

if TYPE_CHECKING:
    from trimesh import aio, blocking, config, observe, programs, rdma, service, spmd, telemetry, tensor, testing
    from trimesh._runtime.life import propagate
    from trimesh._runtime.metrics import log
    from trimesh.actor.host_mesh import DeviceMesh, heal
    from trimesh.actor.placement.placement import Need, Placement, Places, Resources
    from trimesh.actor.proc_mesh import current_view
    from trimesh.blocking import from_thread
    from trimesh.events import Departed, MembershipView
    from trimesh.programs import connect, publish_as
    from trimesh.rdma import RDMABuffer
    from trimesh.telemetry.files import log_to
    from trimesh.tensor import (
        Placements,
        Publication,
        RecordingError,
        call_on_shard_and_fetch,
        compile,  # noqa: A004 - as torch's own
        distribute,
        fetch,
        fetch_shard,
        get_rng_state,
        grad_generator,
        inspect,
        manual_seed,
        module_to_mesh,
        optimizer_to_mesh,
        placements,
        publication,
        rdma_buffers,
        redistribute,
        reduce,
        reduce_,
        remote,
        replicate,
        rref,
        set_rng_state,
        show,
    )

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorMesh",
    "Backoff",
    "CollectiveFailed",
    "ConfigError",
    "ConnectError",
    "ConnectionLost",
    "Context",
    "DeadlockError",
    "Departed",
    "DeviceMesh",
    "DeviceMeshError",
    "Died",
    "Endpoint",
    "Extent",
    "FailFast",
    "Failed",
    "Failure",
    "GaveUp",
    "HostLost",
    "HostMesh",
    "HostRefused",
    "Isolate",
    "Lagged",
    "LimitExceeded",
    "LinkLost",
    "LinkStatistics",
    "MailboxStatistics",
    "MemberStatistics",
    "MembershipChanged",
    "MembershipView",
    "MeshError",
    "MeshErrorGroup",
    "MeshStatistics",
    "MeshStopped",
    "Need",
    "Origin",
    "Outcome",
    "Overloaded",
    "PayloadError",
    "Placement",
    "Placements",
    "Places",
    "Point",
    "Port",
    "ProcDied",
    "ProcMesh",
    "ProtocolError",
    "Publication",
    "RDMABuffer",
    "Receiver",
    "RecordingError",
    "Region",
    "RemoteCancelled",
    "RemoteError",
    "RemoteTraceback",
    "Reply",
    "Resources",
    "Restart",
    "RestartLimit",
    "Restarted",
    "Restarting",
    "Retry",
    "ShapeError",
    "SpawnError",
    "Stalled",
    "Started",
    "StartedCall",
    "TrimeshError",
    "TrimeshInternalError",
    "Unacknowledged",
    "Unresponsive",
    "ValueMesh",
    "aio",
    "blocking",
    "by_value",
    "call_on_shard_and_fetch",
    "cancel_on",
    "compile",
    "config",
    "configured",
    "connect",
    "context",
    "coords",
    "current_point",
    "current_rank",
    "current_size",
    "current_view",
    "distribute",
    "dump",
    "endpoint",
    "fetch",
    "fetch_shard",
    "from_thread",
    "get_rng_state",
    "grad_generator",
    "heal",
    "inspect",
    "leaves",
    "log",
    "log_to",
    "manual_seed",
    "module_to_mesh",
    "observe",
    "open_channel",
    "optimizer_to_mesh",
    "origin",
    "per_rank",
    "placements",
    "programs",
    "progress",
    "propagate",
    "publication",
    "publish_as",
    "rdma",
    "rdma_buffers",
    "redistribute",
    "reduce",
    "reduce_",
    "remote",
    "replicate",
    "rref",
    "run_process",
    "service",
    "set_rng_state",
    "show",
    "spmd",
    "telemetry",
    "tensor",
    "testing",
    "this_host",
    "this_proc",
]


_LATE = {
    "Departed": "trimesh.events",
    "DeviceMesh": "trimesh.actor.host_mesh",
    "MembershipView": "trimesh.events",
    "Need": "trimesh.actor.placement.placement",
    "Placement": "trimesh.actor.placement.placement",
    "Places": "trimesh.actor.placement.placement",
    "RDMABuffer": "trimesh.rdma",
    "Resources": "trimesh.actor.placement.placement",
    "connect": "trimesh.programs",
    "current_view": "trimesh.actor.proc_mesh",
    "heal": "trimesh.actor.host_mesh",
    "log": "trimesh._runtime.metrics",
    "log_to": "trimesh.telemetry.files",
    "propagate": "trimesh._runtime.life",
    "publish_as": "trimesh.programs",
}

_TENSORS = (
    "Placements",
    "Publication",
    "RecordingError",
    "call_on_shard_and_fetch",
    "compile",
    "distribute",
    "fetch",
    "fetch_shard",
    "get_rng_state",
    "grad_generator",
    "inspect",
    "manual_seed",
    "module_to_mesh",
    "optimizer_to_mesh",
    "placements",
    "publication",
    "rdma_buffers",
    "redistribute",
    "reduce",
    "reduce_",
    "remote",
    "replicate",
    "rref",
    "set_rng_state",
    "show",
)


_NAMES: list[str] = globals().pop("__all__")  # names that `__getattr__` provides, without those not installed


def __getattr__(name: str) -> Any:
    """Import heavy or rarely used names on first use."""
    if name == "__all__":
        from importlib.util import find_spec  # noqa: PLC0415 - few programs use `__all__`

        has_torch = find_spec("torch") is not None
        return [one for one in _NAMES if has_torch or one not in (*_TENSORS, "tensor")]
    try:
        found = globals()[name] = _import(name)
    except ModuleNotFoundError as error:
        frame = sys._getframe(1)  # noqa: SLF001 - of the importing code
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
            raise  # `from trimesh import ...` shows this error, and would hide an AttributeError
        raise AttributeError(str(error)) from error
    return found


def _import(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    if name in _TENSORS:
        return getattr(importlib.import_module("trimesh.tensor"), name)
    if name in ("aio", "blocking", "observe", "programs", "rdma", "service", "spmd", "telemetry", "tensor", "testing"):
        return importlib.import_module(f"trimesh.{name}")
    if name == "from_thread":
        return importlib.import_module("trimesh.blocking.from_thread")
    raise AttributeError(f"module 'trimesh' has no attribute {name!r}")
