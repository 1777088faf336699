"""What the native library says of RDMA adapters.

Among that, what they are called, by the transports that UCX has for them: "ibverbs", "efa", or "ucx" for others.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from trimesh._native import status
from trimesh._native.lib import Library
from trimesh._transport.interface.mover import MemoryKind

_TRANSPORT: Final = re.compile(r"(\w+)/(\w+)")

_EFA_DEVICE: Final = re.compile(r"efa_|rdmap\d+s")
"""As the two naming schemes of Linux call them; older versions of UCX use them by "ud_verbs"."""

_IBVERBS: Final = re.compile(r"(rc|ud|dc|gga)_(verbs|mlx5)")


class Adapters(msgspec.Struct, frozen=True):
    """What the native library says of the adapters of this process.

    Attributes:
        are_usable: Whether there are any, and a library that drives them.
        knows_devices: Whether that knows memory of CUDA devices.
        about: Which library it is and what it drives; or why there are none.
        why_no_device: Why they move no memory of devices, or did not when last tried; "" when they do, or may.
    """

    are_usable: bool
    knows_devices: bool
    about: str
    why_no_device: str


def adapters_of(library: Library, mover: Any) -> Adapters:
    """Ask for the adapters of a mover; the first time it takes as long as starting an interpreter."""
    out = library.ffi.new("tm_adapters *")
    status.check(library.lib.tm_mover_get_adapters(mover, out), "asking for RDMA adapters")
    about, why = (library.ffi.string(text).decode(errors="replace") for text in (out.about, out.why_no_device))
    return Adapters(bool(out.usable), bool(out.memory >> MemoryKind.CUDA & 1), about, why)


def adapter_name(about: str) -> str:
    """Return what carries bytes for UCX, by what the native library says of it.

    Args:
        about: "UCX 1.19.0 (/usr/lib/libucp.so.0): rc_mlx5/mlx5_0:1, ud_mlx5/mlx5_0:1".
    """
    found = _TRANSPORT.findall(about.rpartition("): ")[2])
    if any(transport == "srd" or _EFA_DEVICE.match(device) for transport, device in found):
        return "efa"
    return "ibverbs" if any(_IBVERBS.fullmatch(transport) for transport, _ in found) else "ucx"
