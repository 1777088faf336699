"""Lifetime of one process: its tables, its family and the host of its machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trimesh._runtime.life.borrowing import (
        BorrowedProcs,
        BorrowPlan,
        HostsPlan,
        adopt_borrowed,
        get_borrowed,
        open_borrowed,
        open_borrowed_procs,
    )
    from trimesh._runtime.life.controller import lease_proc
    from trimesh._runtime.life.current import current_proc, dump, find_proc, find_proc_anywhere, proc_for, rebuild
    from trimesh._runtime.life.job_hosts import HostCode, HostsNotice, JobHosts, ReferredHosts, ShownHosts
    from trimesh._runtime.life.ownership import (
        ActorPlan,
        OwnedHost,
        OwnedProcs,
        adopt_actors,
        adopt_procs,
        check_per_host,
        open_actors,
        open_part,
        open_procs,
        open_warm_host,
        own_process,
        stop_procs,
    )
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.life.propagation import propagate
    from trimesh._runtime.life.tracing import trace_calls

_HOMES: Final = {
    "ActorPlan": "ownership",
    "BorrowPlan": "borrowing",
    "BorrowedProcs": "borrowing",
    "HostCode": "job_hosts",
    "HostsNotice": "job_hosts",
    "HostsPlan": "borrowing",
    "JobHosts": "job_hosts",
    "OwnedHost": "ownership",
    "OwnedProcs": "ownership",
    "Proc": "proc",
    "ReferredHosts": "job_hosts",
    "ShownHosts": "job_hosts",
    "adopt_actors": "ownership",
    "adopt_borrowed": "borrowing",
    "adopt_procs": "ownership",
    "check_per_host": "ownership",
    "current_proc": "current",
    "dump": "current",
    "find_proc": "current",
    "find_proc_anywhere": "current",
    "get_borrowed": "borrowing",
    "lease_proc": "controller",
    "open_actors": "ownership",
    "open_borrowed": "borrowing",
    "open_borrowed_procs": "borrowing",
    "open_part": "ownership",
    "open_procs": "ownership",
    "open_warm_host": "ownership",
    "own_process": "ownership",
    "proc_for": "current",
    "propagate": "propagation",
    "rebuild": "current",
    "stop_procs": "ownership",
    "trace_calls": "tracing",
}

__all__ = [
    "ActorPlan",
    "BorrowPlan",
    "BorrowedProcs",
    "HostCode",
    "HostsNotice",
    "HostsPlan",
    "JobHosts",
    "OwnedHost",
    "OwnedProcs",
    "Proc",
    "ReferredHosts",
    "ShownHosts",
    "adopt_actors",
    "adopt_borrowed",
    "adopt_procs",
    "check_per_host",
    "current_proc",
    "dump",
    "find_proc",
    "find_proc_anywhere",
    "get_borrowed",
    "lease_proc",
    "open_actors",
    "open_borrowed",
    "open_borrowed_procs",
    "open_part",
    "open_procs",
    "open_warm_host",
    "own_process",
    "proc_for",
    "propagate",
    "rebuild",
    "stop_procs",
    "trace_calls",
]


def __getattr__(name: str) -> Any:
    """Import a submodule on first use: most are needed only by processes that open meshes."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
