"""Which carriers a process may use, and where it listens for the network: what its environment says.

TRIMESH_RDMA=tcp,cma        only these, beside memory of the process itself
TRIMESH_RDMA_ADDRESS=IP     listen there for tcp; without it tcp listens on 127.0.0.1, and only if TRIMESH_RDMA
names it, or if other processes of this host cannot be reached otherwise
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Final

import attrs

from trimesh._transport.mover import Carrier

_CHOICES: Final = {"shm": Carrier.SHM, "cma": Carrier.CMA, "tcp": Carrier.TCP, "ucx": Carrier.UCX}
_LOOPBACK: Final = ipaddress.IPv4Address("127.0.0.1").packed


@attrs.frozen
class CarrierChoice:
    """What a mover may use.

    Attributes:
        carriers: These.
        address: Where it listens, 4 or 16 bytes; empty for nowhere.
    """

    carriers: Carrier
    address: bytes


def chosen_carriers(environment: Mapping[str, str] = os.environ) -> CarrierChoice:
    """Return what the environment says.

    Raises:
        ValueError: It names a carrier that there is not, or an address that is none.
    """
    named = environment.get("TRIMESH_RDMA", "")
    carriers = Carrier.LOCAL
    for name in filter(None, (one.strip() for one in named.split(","))):
        if name not in _CHOICES:
            raise ValueError(f"TRIMESH_RDMA must name some of {', '.join(_CHOICES)}, separated by commas, got {name!r}")
        carriers |= _CHOICES[name]
    if not named.strip():
        for one in _CHOICES.values():
            carriers |= one
    place = environment.get("TRIMESH_RDMA_ADDRESS", "")
    if place:
        try:
            address = ipaddress.ip_address(place).packed
        except ValueError:
            raise ValueError(f"TRIMESH_RDMA_ADDRESS must be an IP address of this host, got {place!r}") from None
    else:
        address = _LOOPBACK if named and Carrier.TCP in carriers else b""
    return CarrierChoice(carriers, address if Carrier.TCP in carriers else b"")
