"""Use of GPUs by this process, read by NVML every few seconds once the process has loaded CUDA.

GF-1 A process without CUDA, or a machine without GPUs, reads nothing.
GF-2 Reads run in a thread, which is left behind when the driver hangs: no call and no exit waits for it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits
from trimesh.config import Settings

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_DEVICE: Final = Path("/dev/nvidiactl")


async def keep_reading(proc: Proc, settings: Settings) -> None:
    """Read the use of GPUs into `proc.gpu_use` until cancelled; return at once where there are none."""
    library = settings.nvml
    if not library and not _DEVICE.exists():
        return
    while True:
        await trio.sleep(limits.GPU_SECONDS)
        try:
            proc.gpu_use = await trio.to_thread.run_sync(_use_of, proc.pid, library, abandon_on_cancel=True)
        except Exception:  # noqa: BLE001 - NVML is missing or fails: the columns stay empty
            return


def _use_of(pid: int, library: str) -> tuple[int, int]:
    """Return the use in percent of the busiest GPU on which a process has memory, and its memory on all of them."""
    if not library and not _has_cuda():
        return 0, 0
    from trimesh._runtime.system.nvml import NVMLError, open_nvml  # noqa: PLC0415 - few processes have GPUs

    percent = memory = 0
    with open_nvml(library) as nvml:
        for index in range(nvml.count()):
            with suppress(NVMLError):  # of a GPU that this process may not use
                handle = nvml.handle(index)
                here = nvml.memory_by_process(handle)
                if pid in here:
                    memory += here[pid]
                    percent = max(percent, nvml.utilization(handle).gpu)
    return percent, memory


def _has_cuda() -> bool:
    with open(f"/proc/{os.getpid()}/maps", encoding="utf-8", errors="replace") as maps:
        return any("libcuda.so" in line for line in maps)
