"""Figures of this machine: processors, memory, network, file systems, GPUs; read when an observer asks for them.

FM-1 Reads run in threads, one of each kind at a time. While a file system or a driver hangs, the last figures are
     returned, with their time; neither the loop nor an exit waits.
FM-2 What cannot be read is 0 or missing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.system.nvml import NVML, GPUDevice, NVMLError, open_nvml
from trimesh._runtime.system.user_files import user_folder
from trimesh._wire.observed import DiskRow, GPURow, HostRow

_DEVICE: Final = Path("/dev/nvidiactl")
_INTERFACES: Final = Path("/sys/class/net")
_WORKING: Final = (0, 1, 2, 5, 6)
"""Columns of /proc/stat with time in which a processor works: user, nice, system, irq, softirq."""


class MachineReader:
    """Reader of the figures of this machine.

    Args:
        library: Path of NVML; "" for the one that the system's loader finds.
    """

    def __init__(self, library: str = "") -> None:
        self._library = library
        self._row = HostRow(name="", pid=os.getpid())
        self._files, self._driver = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
        self._gpus: tuple[GPURow, ...] = ()
        self._has_gpus = bool(library) or _DEVICE.exists()
        self._gpus_at = -math.inf

    async def read(self) -> HostRow:
        """Return the figures, without a name. Waits at most `limits.MACHINE_SECONDS`."""
        with trio.move_on_after(limits.MACHINE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._in_thread, self._read_files, self._files)
                if self._has_gpus and trio.current_time() >= self._gpus_at + limits.GPU_SECONDS:
                    self._gpus_at = trio.current_time()
                    nursery.start_soon(self._in_thread, self._read_gpus, self._driver)
        return msgspec.structs.replace(self._row, gpus=self._gpus)

    @staticmethod
    async def _in_thread(read: Callable[[], None], one: trio.CapacityLimiter) -> None:
        with suppress(Exception):  # an observation ends no run
            await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=one)

    def _read_files(self) -> None:
        memory = _memory()
        received, sent = _network()
        self._row = msgspec.structs.replace(
            self._row,
            at=time.time(),
            cpus=os.cpu_count() or 0,
            cpu_seconds=_cpu_seconds(),
            memory_bytes=memory.get("MemTotal", 0),
            memory_free_bytes=memory.get("MemAvailable", 0),
            received_bytes=received,
            sent_bytes=sent,
            disks=tuple(_disks()),
            trimesh=self._row.trimesh or own_version(),
            python=sys.version.partition(" ")[0],
            kernel=os.uname().release,
        )

    def _read_gpus(self) -> None:
        try:
            with open_nvml(self._library) as nvml:
                self._gpus = tuple(_gpu(nvml, device) for device in nvml.devices())
        except NVMLError:
            self._gpus, self._has_gpus = (), False


def own_version() -> str:
    """Return the version of trimesh here."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow, and rarely needed

    try:
        return version("trimesh-actors")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _gpu(nvml: NVML, device: GPUDevice) -> GPURow:
    percent = celsius = -1
    with suppress(NVMLError):
        handle = nvml.handle(device.index)
        celsius = nvml.celsius(handle)
        if not device.is_slice:
            percent = nvml.utilization(handle).gpu
    return GPURow(
        index=device.index,
        name=device.name,
        percent=percent,
        memory_bytes=device.memory,
        used_bytes=device.memory - device.free,
        celsius=celsius,
    )


def _cpu_seconds() -> float:
    with suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as stat:
        ticks = stat.readline().split()[1:]
        return sum(int(ticks[column]) for column in _WORKING) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _memory() -> dict[str, int]:
    """Return rows of /proc/meminfo in bytes."""
    found = dict[str, int]()
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as rows:
        for row in rows:
            name, _, value = row.partition(":")
            found[name] = int(value.split()[0]) << 10
    return found


def _network() -> tuple[int, int]:
    """Return bytes received and sent, by the network cards; in a container, which has none, by all but loopback.

    Bridges and bonds would count the bytes of cards twice.
    """
    rows = dict[str, tuple[int, int]]()
    with suppress(OSError, ValueError, IndexError), open("/proc/self/net/dev", encoding="ascii") as interfaces:
        for row in interfaces:
            name, colon, numbers = row.partition(":")
            if colon and name.strip() != "lo":
                counts = numbers.split()
                rows[name.strip()] = int(counts[0]), int(counts[8])
    cards = [counts for name, counts in rows.items() if (_INTERFACES / name / "device").exists()]
    counted = cards or list(rows.values())
    return sum(one for one, _ in counted), sum(other for _, other in counted)


def _disks() -> Iterator[DiskRow]:
    """Yield the file systems that a run writes to, each once."""
    seen = set[int]()
    for folder in (os.environ.get("TMPDIR") or "/tmp", "/dev/shm", str(user_folder().parent), "."):  # noqa: S108 - to measure
        with suppress(OSError):
            device = os.stat(folder).st_dev
            if device not in seen:
                seen.add(device)
                found = os.statvfs(folder)
                path = os.path.realpath(folder)
                yield DiskRow(
                    path=path, nbytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize
                )
