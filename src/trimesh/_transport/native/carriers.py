"""Choice of carriers and of a listening address, from the settings of a process.

    rdma = ["tcp", "cma"]       only these, besides memory of the process itself
    rdma_address = "10.0.0.1"   listen there for tcp

Without an address tcp listens on 127.0.0.1, and only if `rdma` names tcp, or if the system lets no process read another
one's memory.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from trimesh._transport.interface import Carrier
from trimesh.config import Settings

_CHOICES: Final = {"shm": Carrier.SHM, "cma": Carrier.CMA, "tcp": Carrier.TCP, "ucx": Carrier.UCX}
_LOOPBACK: Final = ipaddress.IPv4Address("127.0.0.1").packed
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_ADMINISTRATORS: Final = 2
_STATUS: Final = Path("/proc/self/status")
_CAP_SYS_PTRACE: Final = 19


class CarrierChoice(msgspec.Struct, frozen=True):
    """Carriers that a mover may use.

    Attributes:
        address: Listening address, 4 or 16 bytes; empty for none.
    """

    carriers: Carrier
    address: bytes


def yama_allows(scope_file: Path = _YAMA, status_file: Path = _STATUS) -> bool:
    """Return whether yama, if the kernel has it, lets one process access another one's memory.

    Scope 1 allows processes that the owner names, and a mover names all. Scope 2 needs CAP_SYS_PTRACE, 3 allows none.

    Args:
        scope_file: File with the scope of the kernel.
        status_file: File with the capabilities of this process.
    """
    try:
        scope = int(scope_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return True
    if scope == _YAMA_ADMINISTRATORS:
        held = int(status_file.read_text(encoding="utf-8").partition("CapEff:")[2].split()[0], 16)
        return bool(held >> _CAP_SYS_PTRACE & 1)
    return scope < _YAMA_ADMINISTRATORS


def can_look_at_memory() -> bool:
    """Return whether one process may read and write another one's memory.

    A sandbox refuses even access to one's own memory, which is tried here; yama does not, so its scope is read.
    """
    import ctypes  # noqa: PLC0415 - `import trimesh` stays cheap

    class Piece(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))

    byte = ctypes.c_char(b"x")
    piece, one = ctypes.byref(Piece(ctypes.addressof(byte), 1)), ctypes.c_ulong(1)
    libc = ctypes.CDLL(None)
    calls = libc.process_vm_readv, libc.process_vm_writev
    return yama_allows() and all(call(os.getpid(), piece, one, piece, one, ctypes.c_ulong(0)) == 1 for call in calls)


def chosen_carriers(settings: Settings, can_look: Callable[[], bool] = can_look_at_memory) -> CarrierChoice:
    """Choose the carriers by the settings.

    Args:
        can_look: Returns whether one process may access another one's memory.
    """
    carriers = Carrier.LOCAL
    for name in settings.rdma or _CHOICES:
        carriers |= _CHOICES[name]
    if Carrier.TCP not in carriers:
        return CarrierChoice(carriers, b"")
    if settings.rdma_address:
        return CarrierChoice(carriers, ipaddress.ip_address(settings.rdma_address).packed)
    return CarrierChoice(carriers, _LOOPBACK if settings.rdma or not can_look() else b"")


# ---- host identity ---------------------------------------------------------------------------------------------------

# Identifies this boot of this kernel and this pid namespace: processes with equal ids share /proc/PID, and may access
# each other's memory. The setting `host_id` replaces it, so that two parts of one machine can count as two hosts.


def boot_id() -> str:
    """Return the kernel's boot id, unique to each start of a machine.

    Raises:
        OSError: The kernel does not provide it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def host_identity(named: str = "") -> int:
    """Return the identity of this host, or the one that the name stands for; never 0."""
    text = f"named {named}" if named else f"boot {boot_id()} pids {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) | 1
