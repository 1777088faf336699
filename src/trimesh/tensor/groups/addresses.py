"""Where the ranks of a process group listen for each other: on this machine, or on a network that a setting names.

Each rank says which machine it is on, and its address there. On one machine all take 127.0.0.1. Otherwise each takes
the address of the setting `collectives`, and there is no group without: neither gloo nor NCCL encrypts, or asks who
connects, so the network must be one that the user has named.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs
import msgspec

from trimesh._runtime.system import host_name
from trimesh._transport.native.host_identity import boot_id
from trimesh.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915
_IPV6: Final = Path("/proc/net/if_inet6")
_NAME_BYTES_MAX: Final = 15
_NO_MACHINE: Final = "a rank has said something else than its machine and address"


@attrs.frozen
class Interface:
    """An address of this machine, and the name of the interface that has it."""

    name: str
    address: str


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says to the others of its group.

    Attributes:
        machine: The same for ranks that reach each other by 127.0.0.1.
        address: That it would listen on for those of other machines; "" for none.
        interface: Name of the interface that has it.
    """

    machine: str
    address: str = ""
    interface: str = ""


def interfaces_here() -> list[Interface]:
    """Return the addresses of this machine, loopback first: interfaces are numbered in the order that they came."""
    found = list[Interface]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none of version 4
                said = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:_NAME_BYTES_MAX]))
                found.append(Interface(name, socket.inet_ntoa(said[20:24])))
    with suppress(OSError):  # a kernel without version 6
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, scope, _, name = line.split()
            if scope != "20":  # of the link alone: means nothing without an interface
                found.append(Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def place_here(wanted: str, interfaces: Iterable[Interface] | None = None) -> RankPlace:
    """Return what this rank says.

    Args:
        wanted: Setting `collectives`: an address, a network, or an interface of this machine; "" for none.
        interfaces: Those of this machine, unless it is to be asked.

    Raises:
        ConfigError: This machine has nothing of that.
    """
    if not wanted:
        return RankPlace(machine_here())
    known = list(interfaces_here() if interfaces is None else interfaces)
    for one in known:
        if wanted == one.name or _is_in(one.address, wanted):
            return RankPlace(machine_here(), one.address, one.name)
    has = ", ".join(f"{one.name} {one.address}" for one in known)
    raise ConfigError(
        f"the setting collectives must name an address, a network or an interface of each host, got {wanted!r} on "
        f"{host_name()}, which has {has or 'no address'}"
    )


def meeting_place(own: RankPlace, said: Sequence[bytes]) -> RankPlace:
    """Return where this rank listens, with the address and the interface, "" if that is loopback.

    Args:
        own: What it has said.
        said: What all ranks of the group have said, encoded.

    Raises:
        ConfigError: They are on several machines, and one has no address for the others.
    """
    try:
        places = [msgspec.json.decode(one, type=RankPlace) for one in said]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_NO_MACHINE}: {error}") from None
    if all(place.machine == own.machine for place in places):
        return RankPlace(own.machine, LOOPBACK)
    for index, place in enumerate(places):
        if not place.address or ipaddress.ip_address(place.address).is_loopback:
            raise ConfigError(
                "a process group of ranks on several machines needs the setting collectives, got "
                f"{place.address or 'nothing'} at rank {index}: gloo and NCCL neither encrypt nor ask who connects, "
                'so name a network that is trusted, as env={"TRIMESH_COLLECTIVES": "eth0"}, or "10.0.0.0/8"'
            )
    return own


def _is_in(address: str, wanted: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    return False


def machine_here() -> str:
    """Name what has this loopback interface: a boot of a kernel, and a namespace of networks."""
    return hashlib.sha256(f"{boot_id()} {os.stat('/proc/thread-self/ns/net').st_ino}".encode()).hexdigest()[:16]
