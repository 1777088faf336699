"""One process from its start to its end: its tables, its family, its host."""

from trimesh._runtime.life.borrowing import BorrowPlan, get_borrowed, open_borrowed
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.current import current_proc, find_proc, find_proc_anywhere, proc_for
from trimesh._runtime.life.dumping import dump
from trimesh._runtime.life.job_hosts import JobHosts
from trimesh._runtime.life.ownership import (
    ActorPlan,
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
from trimesh._runtime.life.rebuilding import rebuild
from trimesh._runtime.life.sharing import named_of

__all__ = [
    "ActorPlan",
    "BorrowPlan",
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
]
