"""Name faults: names of hosts that do not resolve, resolve late, or resolve to another address.

`FaultyResolver` replaces the functions of `socket` that look up names, for Trio, asyncio and libraries in Python, too.
Addresses are not looked up. Libraries that resolve in C (gRPC, libpq) do not ask.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import attrs

from trimesh.testing.plans.disk_faults import ALWAYS
from trimesh.testing.plans.fault import (
    ActiveFault,
    Heal,
    MemberFault,
    OfMembers,
    Place,
    checked_amount,
    checked_count,
    checked_one_of,
)

Refusal = Literal["EAI_NONAME", "EAI_AGAIN", "EAI_FAIL"]

_TEXTS: Final = {
    "EAI_NONAME": "Name or service not known",
    "EAI_AGAIN": "Temporary failure in name resolution",
    "EAI_FAIL": "Non-recoverable failure in name resolution",
}


@attrs.frozen
class Lookup:
    """What faults do to one lookup.

    Attributes:
        seconds: How long it takes longer.
        error: Name of the resolver's error, or "".
        address: Address that the name has instead of its own, or "".
    """

    seconds: float = 0.0
    error: str = ""
    address: str = ""


@attrs.frozen
class NameFault(MemberFault):
    """From the `nth` lookup on, counted for each process since this was planned, `times` of them misbehave.

    Attributes:
        name: The name; "" for all.
        effect: What it does to each.
    """

    name: str
    effect: Lookup
    nth: int = 1
    times: int = ALWAYS

    def __str__(self) -> str:
        one = self.effect
        effect = f"fails({one.error})" if one.error else f"resolves({one.address})" if one.address else ""
        return f"names {self.where.text} {self.name or '*'} nth={self.nth}: {effect or f'slow({one.seconds:g})'}"

    def resolving(self, active: ActiveFault, place: Place, name: str) -> Lookup | None:
        if place not in self.where.places or self.name not in ("", name):
            return None
        if not active.hits(place, self.nth, self.times):
            return None
        active.fire_at("names", place)
        return self.effect


@attrs.frozen(eq=False)
class OfNames(OfMembers):
    """Names of hosts, as some members look them up in Python."""

    _name: str

    def fails(self, error: Refusal = "EAI_NONAME", *, nth: int = 1, times: int = ALWAYS) -> Heal:
        """Make lookups raise `socket.gaierror`; all from now on by default.

        Args:
            error: "EAI_NONAME" (there is no such name), "EAI_AGAIN" (no answer for now), "EAI_FAIL".
            nth: Number of the first lookup, counted for each member from now on.
            times: Number of lookups from there on.

        Returns:
            A function that ends the fault.
        """
        checked_one_of("the error", error, get_args(Refusal))
        return self._plan(Lookup(error=error), checked_count("nth", nth), checked_count("times", times))

    def slow(self, seconds: float) -> Heal:
        """Let each lookup take `seconds` longer, which blocks its thread.

        Returns:
            A function that ends the fault.
        """
        return self._plan(Lookup(seconds=checked_amount("seconds", seconds)))

    def resolves(self, address: str) -> Heal:
        """Give the names another address.

        Returns:
            A function that gives them their own again.

        Raises:
            ValueError: It is no address.
        """
        if name_of(address) is not None:
            raise ValueError(f'names must resolve to an IP address such as "127.0.0.9", got {address!r}')
        return self._plan(Lookup(address=address))

    def _plan(self, effect: Lookup, nth: int = 1, times: int = ALWAYS) -> Heal:
        return self._faults.plan(NameFault(self._where, self._name, effect, nth, times))


# ---- what stands between an actor and the resolver -------------------------------------------------------------------


@attrs.frozen(eq=False)
class FaultyResolver:
    """Resolver of one process, or of a simulation.

    Attributes:
        is_asked: Whether faults are possible in the running code.
        look_up: Called with a name before each lookup; returns what faults do to it.
        wait: Lets the running code spend some seconds.
        answer: Returns the address of a name, of a family; None to ask the real resolver.
    """

    is_asked: Callable[[], bool]
    look_up: Callable[[str], list[Lookup]]
    wait: Callable[[float], None]
    answer: Callable[[str, int], str] | None = None

    def resolve(self, host: Any, family: int = 0) -> Any:
        """Return the host that the real resolver is asked for instead of this one.

        Raises:
            socket.gaierror: A fault lets the lookup fail.
        """
        name = name_of(host)
        if name is None or not self.is_asked():
            return host
        for lookup in sorted(self.look_up(name), key=lambda lookup: -lookup.seconds):  # the error comes late, too
            self.wait(lookup.seconds)
            if lookup.error:
                raise socket.gaierror(getattr(socket, lookup.error), _TEXTS[lookup.error])
            if lookup.address:
                return lookup.address
        return host if self.answer is None else self.answer(name, family)

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Return the names to replace: (owner, name, function)."""
        real, by_name, by_name_ex = socket.getaddrinfo, socket.gethostbyname, socket.gethostbyname_ex

        def getaddrinfo(
            host: Any,
            port: Any,
            family: int = 0,
            type: int = 0,  # noqa: A002 - see above
            proto: int = 0,
            flags: int = 0,
        ) -> Any:
            if not flags & socket.AI_NUMERICHOST:
                host = self.resolve(host, family)
            return real(host, port, family, type, proto, flags)

        def gethostbyname(hostname: Any) -> str:
            return by_name(self.resolve(hostname))

        def gethostbyname_ex(hostname: Any) -> Any:
            found = self.resolve(hostname)
            return by_name_ex(hostname) if found == hostname else (hostname, [], [found])

        return [
            (socket, "getaddrinfo", getaddrinfo),
            (socket, "gethostbyname", gethostbyname),
            (socket, "gethostbyname_ex", gethostbyname_ex),
            *((socket.socket, name, self._connecting(getattr(socket.socket, name))) for name in _CONNECTS),
        ]

    def _connecting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def connect(one: socket.socket, address: Any, /) -> Any:
            if isinstance(address, tuple) and address and one.family in (socket.AF_INET, socket.AF_INET6):
                address = (self.resolve(address[0], one.family), *address[1:])
            return real(one, address)

        return connect


_CONNECTS: Final = ("connect", "connect_ex")


def name_of(host: Any) -> str | None:
    """Return the name that has to be looked up for a host; None for an address, and for the host itself."""
    try:
        text = host.decode("ascii") if isinstance(host, bytes | bytearray) else host
    except UnicodeDecodeError:
        return None
    if not isinstance(text, str) or text in ("", "<broadcast>"):
        return None
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text.lower().removesuffix(".")
    return None


def virtual_address(name: str, family: int) -> str:
    """Return the address of a name in a simulation, from the ranges for benchmarks and documentation."""
    if name == "localhost":
        return "::1" if family == socket.AF_INET6 else "127.0.0.1"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    network = ipaddress.ip_network("2001:db8::/32" if family == socket.AF_INET6 else "198.18.0.0/15")
    return str(network[number % network.num_addresses])
