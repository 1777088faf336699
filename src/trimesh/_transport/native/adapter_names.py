"""What RDMA adapters are called, by the transports that UCX has for them: "ibverbs", "efa", or "ucx" for others."""

from __future__ import annotations

import re
from typing import Final

_TRANSPORT: Final = re.compile(r"(\w+)/(\w+)")

_EFA_DEVICE: Final = re.compile(r"efa_|rdmap\d+s")
"""As the two naming schemes of Linux call them; older versions of UCX use them by "ud_verbs"."""

_IBVERBS: Final = re.compile(r"(rc|ud|dc|gga)_(verbs|mlx5)")


def adapter_name(about: str) -> str:
    """Return what carries bytes for UCX, by what the native library says of it.

    Args:
        about: "UCX 1.19.0 (/usr/lib/libucp.so.0): rc_mlx5/mlx5_0:1, ud_mlx5/mlx5_0:1".
    """
    found = _TRANSPORT.findall(about.rpartition("): ")[2])
    if any(transport == "srd" or _EFA_DEVICE.match(device) for transport, device in found):
        return "efa"
    return "ibverbs" if any(_IBVERBS.fullmatch(transport) for transport, _ in found) else "ucx"
