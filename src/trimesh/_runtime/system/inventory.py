"""Inventory of this host: CPUs, memory and GPUs that this process may use, and the labels of the host.

IV-1 Nothing counts that this process may not use: its affinity, the limits of its cgroups and `CUDA_VISIBLE_DEVICES`
     restrict what the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from trimesh._runtime.system.cpu_binding import machine_here
from trimesh._runtime.system.nvml import GPUDevice, NVMLError, open_nvml
from trimesh.config import Settings, from_environment

_CGROUPS: Final = Path("/sys/fs/cgroup")
_GIB: Final = 1 << 30
_SIMULATED_CPUS: Final = 16
_SIMULATED_GPUS: Final = 8


class GPU(msgspec.Struct, frozen=True):
    """A GPU of a host, or a slice of one (MIG).

    Attributes:
        index: Its number on the host, in the order of PCI addresses; slices have that of their GPU.
        uuid: As `CUDA_VISIBLE_DEVICES` takes it.
        name: Model.
        memory: Bytes of its memory.
        memory_free: Bytes that no process used when it was inspected.
        node: NUMA node that it is attached to; -1 if unknown.
        is_slice: Whether it is a slice; a process can use only one.
    """

    index: int
    uuid: str
    name: str
    memory: int
    memory_free: int
    node: int = -1
    is_slice: bool = False


class Inventory(msgspec.Struct, frozen=True):
    """What a host has for the processes of a program; see `Resources`."""

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    cpu_limit: float | None
    memory: int
    memory_free: int
    gpus: tuple[GPU, ...]
    no_gpus: str
    labels: dict[str, str]


def own_settings(below: Settings) -> Settings:
    """Return the settings of this host: those of its environment over others.

    Raises:
        ConfigError: A setting in the environment of this host is invalid.
    """
    return from_environment(below, os.environ)


def take_inventory(labels: Sequence[str], gpus: tuple[GPU, ...] = (), no_gpus: str = "") -> Inventory:
    """Inspect this host.

    Args:
        labels: Its setting `labels`.
        gpus, no_gpus: Its GPUs, and why there are none.

    Blocking: reads some files.
    """
    machine = machine_here()
    numbers = machine.numbers or tuple(range(len(machine.nodes)))
    node_of = {cpu: node for node, cpus in zip(numbers, machine.nodes, strict=True) for cpu in cpus}
    cpus = tuple(cpu for core in machine.cores for cpu in sorted(core))
    memory, memory_free = _memory()
    return Inventory(
        cpus,
        tuple(node_of[cpu] for cpu in cpus),
        cpu_limit(),
        memory,
        memory_free,
        gpus,
        no_gpus,
        labels_of(labels),
    )


def simulated_inventory(host: str) -> Inventory:
    """Return the inventory of a simulated host: 16 CPUs on two nodes, 512 GiB, 8 GPUs of 80 GiB."""
    nodes = tuple(cpu * 2 // _SIMULATED_CPUS for cpu in range(_SIMULATED_CPUS))
    memory = 80 * _GIB
    gpus = tuple(
        GPU(index, f"GPU-{host}-{index}", "simulated", memory, memory, index * 2 // _SIMULATED_GPUS)
        for index in range(_SIMULATED_GPUS)
    )
    return Inventory(tuple(range(_SIMULATED_CPUS)), nodes, None, 512 * _GIB, 512 * _GIB, gpus, "", {})


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """Return labels of the texts `name=value`; one without a value has an empty one."""
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def gpus_here(library: str = "", visible: str | None = None) -> tuple[tuple[GPU, ...], str]:
    """Return the GPUs that this process may use, and why there are none.

    Args:
        library: Path of NVML; "" for the system's.
        visible: Value of `CUDA_VISIBLE_DEVICES`; None if it is not set.
    """
    try:
        with open_nvml(library) as nvml:
            devices = nvml.devices()
    except NVMLError as error:
        return (), str(error)
    seen = devices if visible is None else visible_of(devices, visible)
    why = ""
    if not seen:
        why = f"CUDA_VISIBLE_DEVICES is {visible!r}" if devices else "the driver shows none to this process"
    return tuple(GPU(one.index, one.uuid, one.name, one.memory, one.free, one.node, one.is_slice) for one in seen), why


def visible_of(devices: Sequence[GPUDevice], visible: str) -> list[GPUDevice]:
    """Return the devices that a value of `CUDA_VISIBLE_DEVICES` leaves, in its order.

    As CUDA reads it: indices or the beginnings of UUIDs, up to the first entry that names no device. A GPU that is
    divided is named by its slices, or stands for all of them.
    """
    found = list[GPUDevice]()
    for entry in (part.strip() for part in visible.split(",")):
        named = [one for one in devices if _is_named(one, entry)]
        if not named or (not entry.isdecimal() and len({one.parent or one.uuid for one in named}) > 1):
            break
        found += [one for one in named if one not in found]
    return found


def _is_named(device: GPUDevice, entry: str) -> bool:
    if entry.isdecimal():
        return device.index == int(entry)
    uuids = (device.uuid, device.parent)
    return entry.startswith(("GPU-", "MIG-")) and any(uuid.startswith(entry) for uuid in uuids)


# ---- limits of cgroups -----------------------------------------------------------------------------------------------


def cpu_limit(root: Path = _CGROUPS, own: str | None = None) -> float | None:
    """Return the number of CPUs whose time this process may use (the quotas of its cgroups); None for no limit."""
    found = list[float]()
    for folder in _folders(root, "cpu", own):
        quota, period = (
            _texts(folder / "cpu.max", 2)
            or (
                *_texts(folder / "cpu.cfs_quota_us", 1),
                *_texts(folder / "cpu.cfs_period_us", 1),
            )
            or ("max", "1")
        )
        if quota.isdecimal() and int(quota) > 0 and int(period) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(root: Path = _CGROUPS, own: str | None = None) -> tuple[int, int] | None:
    """Return the tightest limit of the cgroups of this process: its bytes, and those left; None for no limit."""
    found = list[tuple[int, int]]()
    for folder in _folders(root, "memory", own):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, used = _texts(folder / limit, 1), _texts(folder / usage, 1)
            if most and used and most[0].isdecimal() and int(most[0]) < 1 << 60:
                found.append((int(most[0]), max(0, int(most[0]) - int(used[0]))))
    return min(found, key=lambda one: one[1], default=None)


def _folders(root: Path, controller: str, own: str | None) -> Iterator[Path]:
    """Yield the folders of the cgroup of this process and of those above it."""
    try:
        lines = (Path("/proc/self/cgroup").read_text(encoding="utf-8") if own is None else own).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        top = root / controller if controllers else root
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _texts(path: Path, count: int) -> tuple[str, ...]:
    try:
        found = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return ()
    return tuple(found) if len(found) == count else ()


def _memory() -> tuple[int, int]:
    """Return the bytes of memory that processes here may use together, and those that are available now."""
    fields: Mapping[str, int] = {}
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        return 0, 0
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit = memory_limit()
    return (total, free) if limit is None else (min(total, limit[0]), min(free, limit[1]))
