"""Addresses of this machine, and their texts."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio
from tests.rows import rows

from trimesh.errors import SpawnError
from trimesh.jobs import addresses


@rows(
    ("host", "expected"),
    [
        ("10.0.0.7", "10.0.0.7:41"),
        ("node", "node:41"),
        ("node:7", "node:7"),
        ("fe80::7", "[fe80::7]:41"),
        ("[fe80::7]", "[fe80::7]:41"),
        ("[fe80::7]:9", "[fe80::7]:9"),
    ],
)
def test_port_is_added_where_there_is_none(host: str, expected: str) -> None:
    assert addresses.with_port(host, 41) == expected


@rows(
    ("text", "expected"),
    [
        ("10.0.0.7:41233", ("10.0.0.7", 41233)),
        ("[fe80::7]:1", ("fe80::7", 1)),
        ("node:65535", ("node", 65535)),
        ("node", None),
        ("node:", None),
        (":7", None),
        ("node:0", None),
        ("node:65536", None),
        ("node:-7", None),
        ("node:²", None),
        ("node:٣", None),
        ("fe80::7:41", None),
    ],
)
def test_address_has_a_host_and_a_port(text: str, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert addresses.checked_address(text) == expected
        return
    with pytest.raises(ValueError, match=r"must be host:port, .* got "):
        addresses.checked_address(text)


@rows(
    ("wanted", "expected"),
    [
        ("10.9.8.7", "10.9.8.7"),
        ("fe80::7", "fe80::7"),
        ("lo", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1/8", "127.0.0.1"),
        ("198.51.100.0/24", ""),
        ("fe80::/64", ""),
        ("no-such-one", ""),
    ],
)
def test_setting_selects_an_address_of_this_machine(wanted: str, expected: str) -> None:
    assert addresses.address_in(wanted) == expected


def test_interfaces_without_an_address_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(1, "no-such-one"), (2, "lo")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: names)
    assert addresses.address_in("127.0.0.0/8") == "127.0.0.1"
    assert addresses.address_in("no-such-one") == ""


class Names(trio.abc.HostnameResolver):
    """Knows one name."""

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if host != b"here":
            raise socket.gaierror("unknown here")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.3", port))]

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


async def test_interface_is_an_address_a_name_or_a_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    trio.socket.set_custom_hostname_resolver(Names())
    assert await addresses.address_of("10.9.8.7") == "10.9.8.7"
    assert await addresses.address_of("fe80::7") == "fe80::7"
    assert await addresses.address_of("lo") == "127.0.0.1"
    assert await addresses.address_of("here") == "127.0.0.3"
    with pytest.raises(SpawnError, match=r"name of an interface \(.*\blo\b.*\), got 'unknown': "):
        await addresses.address_of("unknown")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "no-such-one")])
    with pytest.raises(SpawnError, match=r"the interface no-such-one must have an IPv4 address: .*pass the address"):
        await addresses.address_of("no-such-one")


async def test_address_towards_a_host_is_that_of_the_route_there() -> None:
    trio.socket.set_custom_hostname_resolver(Names())
    assert await addresses.address_towards("here") == "127.0.0.1"
    assert await addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert await addresses.address_towards("127.0.0.1", 4123) == "127.0.0.1"
    if socket.has_ipv6:
        assert await addresses.address_towards("::1") == "::1"
    with pytest.raises(SpawnError, match="the name unknown cannot be resolved"):
        await addresses.address_towards("unknown")
    with pytest.raises(SpawnError, match=r"there is no route to 255\.255\.255\.255: .*denied; pass interface="):
        await addresses.address_towards("255.255.255.255")  # not without SO_BROADCAST


def test_loopback_is_another_machine_on_each_host() -> None:
    assert [addresses.is_loopback(one) for one in ("127.0.0.1", "127.9.9.9", "::1", "10.0.0.7")] == [True] * 3 + [False]


def test_held_port_is_free_for_a_listener_of_this_process() -> None:
    with addresses.held_port() as port, socket.socket() as listener, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
