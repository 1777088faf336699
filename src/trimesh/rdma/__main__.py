"""`python -m trimesh.rdma`: report the carriers of bulk data that work on this machine, and why the others fail."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_host
from trimesh.config import current
from trimesh.errors import LinkLost
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate

NBYTES = 64 << 20
ROUNDS = 5

CARRIERS = {
    "shm": "memory from allocate, mapped by the reader",
    "cma": "any memory of a process of this host, by process_vm_readv",
    "tcp": "any memory of a process that listens, over two TCP connections",
    "ucx": "InfiniBand, RoCE and EFA, by libucp",
    "cuda_ipc": "memory of a CUDA device, by a process of this host that sees it",
}


@attrs.frozen
class Trial:
    """Result of trying a carrier.

    Attributes:
        carrier: Its name.
        backend: Its name as `RDMABuffer.backend`; "none" when it does not work.
        seconds: Duration of one read of `NBYTES` bytes; None when it does not work.
        why_not: Why it does not work.
    """

    carrier: str
    backend: str
    seconds: float | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.seconds is None:
            return f"  {self.carrier:<8}   no    {self.why_not}"
        text = f"  {self.carrier:<8}   yes   {NBYTES / self.seconds / 1e9:.1f} GB/s   {CARRIERS[self.carrier]}"
        return text if self.backend == self.carrier else f"{text}; here {self.backend}"


class _Owner(Actor):
    """Owns host memory."""

    def __init__(self) -> None:
        memory = allocate(NBYTES)
        memory[:] = bytes(NBYTES)
        self.buffer = RDMABuffer(memory, writable=False)

    @endpoint
    async def handle(self) -> RDMABuffer:
        return self.buffer


class _DeviceOwner(Actor):
    """Owns memory on a CUDA device, where there is one."""

    @endpoint
    async def make(self) -> RDMABuffer | str:
        """Return the buffer, or the reason why there is none."""
        try:
            return RDMABuffer(await _on_device(), writable=False)
        except (ImportError, RuntimeError, AssertionError, ValueError) as error:
            return str(error)


class _Reader(Actor):
    """Reads the owner's buffer."""

    @endpoint
    async def read(self, buffer: RDMABuffer, carrier: str) -> Trial:
        local = await _on_device() if carrier == "cuda_ipc" else bytearray(NBYTES)
        try:
            await buffer.read_into(local)
        except LinkLost as error:
            return Trial(carrier, "none", why_not=_about(carrier, str(error)))
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            await buffer.read_into(local)
            best = min(best, time.perf_counter() - start)
        return Trial(carrier, buffer.backend, best)


async def _on_device() -> Any:
    torch = await trio.to_thread.run_sync(importlib.import_module, "torch")  # seconds, on a busy machine
    return torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")


async def try_carrier(carrier: str) -> Trial:
    """Spawn two processes and let one read the other's memory with one carrier."""
    if carrier == "cuda_ipc":
        return await _try_device(carrier)
    async with this_host().spawn_procs({"procs": 2}, env={"TRIMESH_RDMA": carrier}) as procs:
        owner = await procs.slice(procs=0).spawn("owner", _Owner)
        reader = await procs.slice(procs=1).spawn("reader", _Reader)
        return await reader.read.call_one(await owner.handle.call_one(), carrier)


async def _try_device(carrier: str) -> Trial:
    async with this_host().spawn_procs({"procs": 2}) as procs:
        owner = await procs.slice(procs=0).spawn("owner", _DeviceOwner)
        reader = await procs.slice(procs=1).spawn("reader", _Reader)
        made = await owner.make.call_one()
        if isinstance(made, str):
            return Trial(carrier, "none", why_not=made)
        return await reader.read.call_one(made, carrier)


_SETTINGS: Final = ("rdma", "rdma_address", "host_id", "ucx")


def describe_machine() -> list[str]:
    """Return the properties of this machine that decide which carriers work."""
    yama = _first_line("/proc/sys/kernel/yama/ptrace_scope") or "absent"
    try:
        devices = ", ".join(sorted(os.listdir("/sys/class/infiniband"))) or "none"
    except OSError:
        devices = "none"
    lines = [
        f"Linux {os.uname().release}, {os.uname().machine}",
        f"yama ptrace_scope: {yama}",
        f"RDMA devices: {devices}",
        f"NVIDIA driver: {'present' if Path('/proc/driver/nvidia/version').exists() else 'absent'}",
    ]
    chosen = current()
    return lines + [f"{name}: {value}" for name in _SETTINGS if (value := getattr(chosen, name))]


def _about(carrier: str, why: str) -> str:
    """Return the part on one carrier of a text about all of them."""
    found = re.search(rf"(?:^| ){carrier}: ([^;]+)", why)
    return found[1] if found else why


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


# ----   main   --------------------------------------------------------------------------------------------------------


async def main() -> None:
    tell("\n".join(describe_machine()))
    tell(f"\nbetween two processes of this host, reading {NBYTES >> 20} MiB:")
    for carrier in CARRIERS:
        tell(await try_carrier(carrier))


def tell(line: object) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    argparse.ArgumentParser("python -m trimesh.rdma", description=__doc__).parse_args()
    trio.run(main)
