"""One process from its start to its end: its tables, its family, its host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.current import current_proc, dump, find_proc, find_proc_anywhere, proc_for, rebuild
from trimesh._runtime.life.ownership import (
    ActorPlan,
    HostCode,
    HostsNotice,
    JobHosts,
    OwnedHost,
    OwnedProcs,
    adopt_actors,
    adopt_procs,
    check_per_host,
    open_actors,
    open_procs,
    open_warm_host,
    own_process,
    stop_procs,
)
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.life.sharing import BorrowPlan, get_borrowed, named_of, open_borrowed

if TYPE_CHECKING:
    from trimesh._runtime.life.tracing import trace_calls

__all__ = [
    "ActorPlan",
    "BorrowPlan",
    "HostCode",
    "HostsNotice",
    "JobHosts",
    "OwnedHost",
    "OwnedProcs",
    "Proc",
    "adopt_actors",
    "adopt_procs",
    "check_per_host",
    "current_proc",
    "dump",
    "find_proc",
    "find_proc_anywhere",
    "get_borrowed",
    "lease_proc",
    "named_of",
    "open_actors",
    "open_borrowed",
    "open_procs",
    "open_warm_host",
    "own_process",
    "proc_for",
    "rebuild",
    "stop_procs",
    "trace_calls",
]


def __getattr__(name: str) -> Any:
    """Load what few programs need when it is asked for."""
    if name == "trace_calls":
        from trimesh._runtime.life.tracing import trace_calls  # noqa: PLC0415

        return trace_calls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
