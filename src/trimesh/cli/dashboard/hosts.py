"""Hosts of a run and the processes on them, for the page; PURE.

HT-1 A host has figures of the machine, with all programs, and beside them those of the run's processes there.
HT-2 Processes with problems come first, then those with the largest value of a column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from trimesh import limits
from trimesh.cli.dashboard.board import SeenRun
from trimesh.observe.run_snapshot import FINE, HostActivity


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of a process, or of all on a host.

    Attributes:
        cpu: Cores in use.
        memory: Resident bytes.
        gpu: Use of the busiest GPU in percent.
        gpu_memory: Bytes on all GPUs.
        nbytes: Bytes per second of the links, both ways.
    """

    cpu: float = 0.0
    memory: int = 0
    gpu: int = 0
    gpu_memory: int = 0
    nbytes: float = 0.0


class HostUse(Use, frozen=True, kw_only=True):
    """One host, and what the run's processes there use.

    Attributes:
        machine: The machine, with all its programs.
    """

    machine: HostActivity


class ProcUse(Use, frozen=True, kw_only=True):
    """One process, and what it uses."""

    name: str
    host: str
    pid: int
    state: str


class HostTable(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and processes.

    Attributes:
        hosts: The hosts, those with problems first, at most `limits.PAGE_HOSTS_MAX`.
        hosts_left_out: Number of further hosts.
        procs: Processes, at most `limits.PAGE_ROWS_MAX`.
        left_out: Number of further processes.
    """

    hosts: tuple[HostUse, ...] = ()
    hosts_left_out: int = 0
    procs: tuple[ProcUse, ...] = ()
    left_out: int = 0


_KEYS: Final[dict[str, Callable[[ProcUse], Any]]] = {
    "memory": lambda one: -one.memory,
    "cpu": lambda one: -one.cpu,
    "gpu": lambda one: (-one.gpu, -one.gpu_memory),
    "nbytes": lambda one: -one.nbytes,
    "name": lambda one: one.name,
    "host": lambda one: (one.host, one.name),
}


def host_table(seen: SeenRun, sort: str = "memory", name: str = "") -> HostTable:
    """Return the hosts of a run and its processes.

    Args:
        seen: The run.
        sort: A column: "memory", "cpu", "gpu", "nbytes", "name" or "host".
        name: Part of the name or host of the processes to return; hosts have that name, or one of these processes.

    Raises:
        ValueError: There is no such column.
    """
    if sort not in _KEYS:
        raise ValueError(f"sort must be one of {', '.join(_KEYS)}, got {sort[:40]!r}")
    procs = [
        ProcUse(
            name=one.proc.name,
            host=one.proc.host,
            pid=one.proc.pid,
            state=one.proc.state,
            cpu=round(one.cpu or 0.0, 3),
            memory=one.proc.memory_bytes,
            gpu=one.proc.gpu_percent,
            gpu_memory=one.proc.gpu_memory_bytes,
            nbytes=one.nbytes,
        )
        for one in seen.activities
    ]
    on = defaultdict[str, list[ProcUse]](list)
    for proc in procs:
        on[proc.host].append(proc)
    wanted = [one for one in procs if name in one.name or name in one.host]
    wanted.sort(key=lambda one: (one.state in FINE, _KEYS[sort](one)))
    there = {one.host for one in wanted}
    hosts = [_use(one, on[one.host.name]) for one in seen.hosts if name in one.host.name or one.host.name in there]
    shown, most = limits.PAGE_HOSTS_MAX, limits.PAGE_ROWS_MAX
    return HostTable(
        hosts=tuple(hosts[:shown]),
        hosts_left_out=max(0, len(hosts) - shown),
        procs=tuple(wanted[:most]),
        left_out=max(0, len(wanted) - most),
    )


def _use(machine: HostActivity, procs: list[ProcUse]) -> HostUse:
    return HostUse(
        machine=machine,
        cpu=round(sum(one.cpu for one in procs), 3),
        memory=sum(one.memory for one in procs),
        gpu=max((one.gpu for one in procs), default=0),
        gpu_memory=sum(one.gpu_memory for one in procs),
        nbytes=sum(one.nbytes for one in procs),
    )
