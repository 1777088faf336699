"""CPU binding: the share of each process of a mesh in the cores, or in the NUMA nodes, of this machine.

Only CPUs that this process may use count: its affinity, which is within the cpuset of its cgroup. A share is a run of
neighbours: of C cores, sorted by node, rank r of n gets cores r*C/n up to, without, (r+1)*C/n.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from trimesh.errors import SpawnError, place_name
from trimesh.shape.extent import Point

Cores = tuple[frozenset[int], ...]
"""Cores of a machine, each as the set of its CPUs (hardware threads)."""

Bind = Literal["cores", "numa"] | Callable[[Point, Cores], Iterable[int]]
"""Rule that chooses the CPUs of each process; see `HostMesh.spawn_procs`."""

_SYSTEM: Final = Path("/sys/devices/system")


class Machine(msgspec.Struct, frozen=True):
    """CPUs of this machine that this process may use.

    Attributes:
        cores: Cores, sorted by node.
        nodes: CPUs of each NUMA node that has usable ones.
        numbers: Numbers of these nodes; -1 if the kernel does not describe it.
    """

    cores: Cores
    nodes: tuple[frozenset[int], ...]
    numbers: tuple[int, ...] = ()

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core)


def machine_here(available: Iterable[int] | None = None, system: Path = _SYSTEM) -> Machine:
    """Return the CPUs that this process may use; without information of the kernel, each CPU is a core of one node.

    Args:
        available: CPUs that may be used; by default the affinity of the calling thread.
        system: Folder in which the kernel describes its devices.
    """
    usable = frozenset(os.sched_getaffinity(0) if available is None else available)
    described = sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    listed = [_cpus_of(path / "cpulist") & usable for path in described]
    rest = usable.difference(*listed)
    numbers = [*(int(path.name[4:]) for path in described), -1]
    known = [(node, number) for node, number in zip([*listed, rest], numbers, strict=True) if node]
    nodes = tuple(node for node, _ in known)
    cores: list[frozenset[int]] = []
    for cpu in (cpu for node in nodes for cpu in sorted(node)):
        if not any(cpu in core for core in cores):
            siblings = _cpus_of(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.append((siblings | {cpu}) & usable)
    return Machine(tuple(cores), nodes, tuple(number for _, number in known))


def own_cpus() -> CpuBinding:
    """Return a binding of all processes to the CPUs of this process, which the spawner may not share."""
    return CpuBinding(lambda _, cores: cores[0], 0, Machine((frozenset(os.sched_getaffinity(0)),), ()))


def simulated_machine(count: int) -> Machine:
    """Return a machine of one node with `count` cores of one CPU each."""
    cores = tuple(frozenset({cpu}) for cpu in range(count))
    return Machine(cores, (frozenset(range(count)),))


def _cpus_of(path: Path) -> frozenset[int]:
    """Read a CPU list of the kernel, `0-3,8`; empty if the file is missing."""
    try:
        text = path.read_text(encoding="ascii").strip()
        ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
        return frozenset(cpu for part in ends for cpu in range(part[0], part[-1] + 1))
    except (OSError, ValueError):
        return frozenset()


class CpuBinding:
    """Chooses the CPUs of the processes of one mesh.

    Raises:
        SpawnError: "cores" is requested, and there are fewer cores than processes.
    """

    def __init__(self, bind: Bind, count: int, machine: Machine) -> None:
        self._bind = bind
        self._count = count
        self._machine = machine
        if bind == "cores" and len(machine.cores) < count:
            raise SpawnError(
                f'bind="cores" needs a core for each process, got {count} processes and {len(machine.cores)} cores '
                f"that this process may use (CPUs {_shown(machine.cpus)}): start fewer, or bind by a function"
            )

    def cpus_of(self, point: Point) -> tuple[int, ...]:
        """Return the CPUs of the process at a point, in order.

        Raises:
            SpawnError: The user's function did not return CPUs that this process may use.
        """
        if callable(self._bind):
            return self._checked(self._bind(point, self._machine.cores), point)
        groups = self._machine.cores if self._bind == "cores" else self._machine.nodes
        return tuple(sorted({cpu for group in _share(groups, point.rank, self._count) for cpu in group}))

    def _checked(self, given: Any, point: Point) -> tuple[int, ...]:
        found = frozenset[int]()
        with suppress(TypeError):
            found = frozenset[int](given)
        if not found or not found <= self._machine.cpus:
            raise SpawnError(
                f"the function bind= must return some of the CPUs {_shown(self._machine.cpus)}, which this process may "
                f"use, got {given!r} for {place_name('', point)}"
            )
        return tuple(sorted(found))


def _share(groups: Sequence[frozenset[int]], rank: int, count: int) -> Sequence[frozenset[int]]:
    """Return the groups for a rank; if there are fewer groups than ranks, neighbours share one."""
    first = rank * len(groups) // count
    return groups[first : max(first + 1, (rank + 1) * len(groups) // count)]


def _shown(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cpus)))


def checked_bind(bind: Any) -> Bind | None:
    """Check `bind` and return it.

    Raises:
        TypeError: It is invalid.
    """
    if bind is None or bind in ("cores", "numa") or callable(bind):
        return cast("Bind | None", bind)
    raise TypeError(
        f'bind must be "cores", "numa", or a function of the point and the cores that returns CPUs, got {bind!r}'
    )


# ---- name of this machine, as text that can be encoded ---------------------------------------------------------------


def host_name() -> str:
    r"""Return the name of this machine; bytes that are not UTF-8, which the kernel allows, are written as `\xff`."""
    return os.fsencode(socket.gethostname()).decode("utf-8", "backslashreplace")
