"""Addresses of this machine at which hosts reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import trio

from trimesh.errors import SpawnError

LOOPBACK: Final = "127.0.0.1"

_SIOCGIFADDR: Final = 0x8915
"""Linux ioctl that returns the IPv4 address of an interface by its name."""

_NAME_BYTES: Final = 15
"""Longest name of an interface, without its zero (IFNAMSIZ)."""

_ANY_PORT: Final = 9
_ELSEWHERE: Final = "192.0.2.1"
"""Address for documentation (RFC 5737) that no machine has: the route there is the default route."""


async def address_of(interface: str) -> str:
    """Return an IP address of this machine.

    Args:
        interface: An IP address, the name of an interface ("eth0"), or a host name of this machine.

    Raises:
        SpawnError: There is no such interface or name.

    Blocking: until the name is resolved.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    if interface in (name for _, name in socket.if_nameindex()):
        return _of_interface(interface)
    try:
        return (await _numbers(interface, _ANY_PORT))[0]
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise SpawnError(
            f"interface= must be an address of this machine, its name, or the name of an interface ({known}), "
            f"got {interface!r}: {error}"
        ) from None


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:_NAME_BYTES]))
        except OSError as error:
            raise SpawnError(
                f"the interface {name} must have an IPv4 address: {error}; pass the address itself by interface="
            ) from None
    return socket.inet_ntoa(found[20:24])


async def address_towards(host: str = "", port: int = _ANY_PORT) -> str:
    """Return the IP address of this machine on the route to a host. Sends nothing to that host.

    Args:
        host: Name or IP address of the host; "" takes the default route.
        port: Any port of the host; the system calls need one.

    Raises:
        SpawnError: The name is unknown, or there is no route.

    Blocking: until the name is resolved.
    """
    problems = list[str]()
    try:
        numbers = await _numbers(host or _ELSEWHERE, port)
    except OSError as error:
        raise SpawnError(f"the name {host} cannot be resolved, to find the route there: {error}") from None
    for number in numbers:
        family = socket.AF_INET6 if ":" in number else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((number, port))
            except OSError as error:
                problems.append(str(error))
            else:
                return str(sock.getsockname()[0])
    where = f"to {host}" if host else "to other machines"
    raise SpawnError(
        f"there is no route {where}: {'; '.join(problems)}; pass interface=, the address at which hosts reach this "
        "machine"
    )


def is_loopback(number: str) -> bool:
    """Return whether an address is a loopback address, which means another machine on each host."""
    return ipaddress.ip_address(number).is_loopback


@contextmanager
def held_port() -> Generator[int, None, None]:
    """Hold a free port of `LOOPBACK` for a later listener of this process, which binds it, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


def with_port(host: str, port: int) -> str:
    """Return `host:port`; keep a port that `host` already has."""
    if host.startswith("[") or host.count(":") == 1:
        return host if not host.endswith("]") else f"{host}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, where an IPv6 address is in brackets.

    Raises:
        ValueError: It has another form.
    """
    host, _, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not host or not is_number or (":" in host and not host.startswith("[")):
        raise ValueError(
            f"an address must be host:port, as the program prints it (10.0.0.7:41233, [fe80::7]:41233), got {address!r}"
        )
    return host.strip("[]"), int(port)


def address_in(wanted: str) -> str:
    """Return the IP address of this machine that a setting selects; "" if there is none.

    Args:
        wanted: An IP address, an IPv4 network ("10.0.0.0/8"), or the name of an interface.
    """
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        network = None
    if network is not None and network.num_addresses == 1:
        return str(network.network_address)
    for _, name in socket.if_nameindex():
        try:
            number = _of_interface(name)
        except SpawnError:
            continue
        if name == wanted or (network is not None and ipaddress.ip_address(number) in network):
            return number
    return ""


async def _numbers(host: str, port: int) -> list[str]:
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return [str(address[4][0]) for address in found]
