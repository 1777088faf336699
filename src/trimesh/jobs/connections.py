"""TLS connections of hosts: the handshake with a door, and direct connections between the agents of two hosts.

DW-1 The dialling agent checks that it reaches the expected incarnation, not another process at its address; the dialled
     one admits only incarnations that it expects. Certificates of the mesh name incarnations. Those of a user's own
     authority name hosts, and a peer with an accepted name is trusted to state its incarnation.
DW-2 A loopback address is sent to other agents only if all hosts are one machine.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec
import trio

from trimesh import limits
from trimesh._native.tls import State, TLSContext, TLSHello, TLSSession, TLSVerdict
from trimesh._runtime.hosts import Connected
from trimesh._runtime.system import host_name
from trimesh._transport.native.carriers import host_identity
from trimesh._transport.relay import HostConnection
from trimesh.config import current
from trimesh.errors import ConfigError, LimitExceeded, LinkLost, leaves
from trimesh.ids import ProcId
from trimesh.jobs.addresses import address_in, is_loopback, with_port
from trimesh.jobs.identity import Credentials

_READ_BYTES: Final = 1 << 16

_FIRST_BYTES: Final = 512

LENGTH: Final = struct.Struct("<I")
"""Length prefix of a certificate request and of the reply."""

CANNOT_JOIN: Final = b"trimesh cannot join: "
"""Prefix of the message of a host that cannot begin a session; the reason follows, for the program to report."""

BEGINS_TLS: Final = b"\x16\x03"
"""First bytes of a TLS record with a hello."""

BEGINS_PLAIN: Final = b"tmplain1"
"""First bytes of a session without TLS (`native/src/tls/plain.zig`)."""

SPEAKS_TLS: Final = bytes((21, 3, 3, 0, 2, 2, 70))
"""TLS alert protocol_version, sent to a peer without TLS, so that it can report the cause."""

Decide = Callable[[TLSHello], TLSVerdict]
Prove = Callable[[TLSSession], None]


def own_versions() -> tuple[str, str, str]:
    """Return the versions of trimesh, Python and torch here; "" for a torch that is not loaded."""
    try:
        own = version("trimesh-actors")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    torch = sys.modules.get("torch")
    return own, platform.python_version(), "" if torch is None else str(torch.__version__).partition("+")[0]


def own_hello(own: ProcId, mesh: bytes, *, is_join: bool = False) -> TLSHello:
    """Return the hello of this process."""
    identity = host_identity(current().host_id)
    return TLSHello(own, mesh, host=identity, versions=own_versions(), is_join=is_join)


def context_of(credentials: Credentials, *, takes_joins: bool = False) -> TLSContext:
    """Return the context for sessions; see `TLSContext`."""
    if credentials.is_plain:
        return TLSContext(is_plain=True)
    chain, key, authority = credentials.chain, credentials.key, credentials.authority
    return TLSContext(chain=chain, key=key, authority=authority, takes_joins=takes_joins)


class SecureSocket:
    """Socket with a TLS session.

    Attributes:
        tls: The session.
        first: The first bytes received, for an error about a peer that uses another protocol.
    """

    def __init__(self, sock: trio.socket.SocketType, tls: TLSSession) -> None:
        self.tls = tls
        self._sock = sock
        self._wire = bytearray()
        self._plain = bytearray()
        self._is_handed_over = False
        self.first = b""

    async def shake_hands(
        self,
        *,
        decide: Decide | None = None,
        prove: Prove | None = None,
        seconds: float = limits.TLS_HALF_OPEN_MS / 1000,
    ) -> None:
        """Shake hands until both sides have sent their hello and the dialled one has admitted the other.

        Args:
            decide: On the dialled side: returns the verdict on a hello.
            prove: On the dialling side of a join: sends the proof of the token.
            seconds: Time limit.

        Raises:
            LinkLost: The handshake failed; the message gives the reason.

        Blocking: at most `seconds`.
        """
        with trio.move_on_after(seconds):
            while True:
                await self._step(b"")
                state = self.tls.state
                if state is State.OPEN:
                    return
                if state is State.PROOF and prove is not None:
                    prove(self.tls)
                elif state is State.ASKING and decide is not None and self.tls.peer is not None:
                    self.tls.answer(decide(self.tls.peer))
                else:
                    await self._receive()
        raise LinkLost(f"the peer was not admitted within {seconds:g} s")

    async def send(self, plain: bytes) -> None:
        """Send bytes to the peer.

        Raises:
            LinkLost: The connection broke.
        """
        while plain:
            plain = plain[await self._step(plain) :]

    async def receive_exactly(self, size: int) -> bytes:
        """Receive `size` bytes from the peer.

        Raises:
            LinkLost: The connection broke first.
        """
        while len(self._plain) < size:
            await self._receive()
            await self._step(b"")
        data = bytes(self._plain[:size])
        del self._plain[:size]
        return data

    async def _receive(self) -> None:
        try:
            data = await self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from None
        if not data:
            self.tls.end()
            raise LinkLost(f"the peer has closed the connection{_why(self.tls)}")
        self._wire += data
        self.first += data[: _FIRST_BYTES - len(self.first)]

    async def _step(self, plain: bytes) -> int:
        """Feed received bytes and `plain` to TLS; return how many bytes of `plain` it took."""
        taken = 0
        while True:
            step = self.tls.step(bytes(self._wire), plain[taken:])
            del self._wire[: step.wire_taken]
            taken += step.plain_taken
            self._plain += step.plain
            if step.wire:
                try:
                    await trio.SocketStream(self._sock).send_all(step.wire)
                except (OSError, trio.BrokenResourceError) as error:
                    raise LinkLost(f"the connection broke: {error}") from None
            if self.tls.state is State.FAILED:
                raise LinkLost(f"the peer cannot be trusted, or does not trust us: {_words(self.tls)}")
            if not (step.wire or step.wire_taken or step.plain_taken):
                return taken

    def hand_over(self) -> HostConnection:
        """Return the connection for the relay to take over; this object is not used afterwards."""
        self._is_handed_over = True
        sock = socket.socket(fileno=self._sock.detach())
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.HOST_UNHEARD_SECONDS))
        return HostConnection(sock, self.tls, bytes(self._wire), bytes(self._plain))

    def close(self) -> None:
        """Close it, unless it was handed over."""
        if not self._is_handed_over:
            self._is_handed_over = True
            self._sock.close()
            self.tls.free()


def words_of_host(first: bytes) -> str | None:
    """Return why a host cannot join, as it (or a stranger) reported instead of a hello; None without a report."""
    if not first.startswith(CANNOT_JOIN):
        return None
    text = first[len(CANNOT_JOIN) :].partition(b"\n")[0].decode("utf-8", "replace")
    return "".join(char if char.isprintable() else " " for char in text)


def _why(tls: TLSSession) -> str:
    return "" if tls.failure is None else f": {_words(tls)}"


def _words(tls: TLSSession) -> str:
    """Return why a session has failed; for a certificate that is not valid now, with the time of this clock."""
    text = str(tls.failure)
    if "not yet valid" in text or "expired" in text:
        text += f"; the clock of this machine is at {time.strftime('%Y-%m-%d %H:%M:%S %Z')}: set it, or the peer's"
    return text


_OFF: Final = "off"


class ListenAddress(msgspec.Struct, frozen=True):
    """Listening address of a door or an agent, and the addresses advertised to hosts.

    Attributes:
        interface: Number of an address of this machine; "" listens nowhere.
        port: 0 lets the system choose.
        advertised: Addresses that hosts dial, `host` or `host:port`, if different: a gateway, a name.
            Empty for an agent that no other host can reach.
    """

    interface: str
    port: int = 0
    advertised: tuple[str, ...] = ()


NOWHERE: Final = ListenAddress("")


def direct_place(wanted: str, advertised: tuple[str, ...], route: str, *, is_one_machine: bool) -> ListenAddress:
    """Return the address at which an agent listens for other agents.

    Args:
        wanted: Setting `direct`.
        advertised: Setting `direct_advertise`.
        route: The address of this machine on its way to the program.
        is_one_machine: Whether all hosts of the job are one machine.

    Raises:
        ConfigError: This machine has no such address.
    """
    if wanted == _OFF:
        return NOWHERE
    number = address_in(wanted) if wanted else route
    if not number:
        raise ConfigError(
            f'the setting direct must be an address, a network or an interface of each host, or "off"; got {wanted!r} '
            f"on {host_name()}"
        )
    if advertised:
        ports = {int(port) for port in (one.rpartition(":")[2] for one in advertised if one.count(":") == 1)}
        return ListenAddress(number, ports.pop() if len(ports) == 1 else 0, advertised)
    address = ipaddress.ip_address(number)
    if (is_loopback(number) and not is_one_machine) or address.is_link_local or address.is_unspecified:
        return NOWHERE
    return ListenAddress(number, 0, (number,))


class DirectWays:
    """Direct connections of an agent to and from other agents, by sockets and TLS.

    Args:
        context: TLS context with the certificate of this agent; outlives this object.
        credentials: The same certificate, key and authority.
        own: Incarnation of this agent.
        mesh: Mesh identifier of its authority.
        place: Listening address.
        nursery: Nursery of the listener.
    """

    def __init__(
        self,
        context: TLSContext,
        credentials: Credentials,
        own: ProcId,
        mesh: bytes,
        place: ListenAddress,
        nursery: trio.Nursery,
    ) -> None:
        self._context = context
        self._credentials = credentials
        self._own = own
        self._mesh = mesh
        self._place = place
        self._nursery = nursery
        self._expected: dict[ProcId, Connected] = {}
        self._listening: trio.CancelScope | None = None
        self._addresses: tuple[str, ...] = ()
        self._half_open = 0

    # ---- the dialled side ------------------------------------------------------------------------------------

    def listen_for(self, peer: ProcId, connected: Connected) -> tuple[str, ...]:
        """Admit an agent, and return the addresses to send to it, if there are any."""
        self._expected[peer] = connected
        if self._listening is None and self._place.interface:
            place = self._place
            family = socket.AF_INET6 if ":" in place.interface else socket.AF_INET
            try:
                sock = socket.create_server((place.interface, place.port), family=family)
            except OSError:  # the address is gone, or the port is taken
                return ()
            sock.setblocking(False)  # noqa: FBT003
            port = sock.getsockname()[1]
            self._addresses = tuple(with_port(one, port) for one in place.advertised)[: limits.DIRECT_ADDRESSES_MAX]
            self._listening = trio.CancelScope()
            self._nursery.start_soon(self._listen, sock, self._listening)
        return self._addresses

    def forget(self, peer: ProcId) -> None:
        """Stop admitting an agent; stop listening after the last one. Idempotent."""
        self._expected.pop(peer, None)
        if not self._expected and self._listening is not None:
            self._listening.cancel(reason="no other agent dials here any more")
            self._listening, self._addresses = None, ()

    async def _listen(self, sock: socket.socket, scope: trio.CancelScope) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        try:
            with scope:
                await trio.serve_listeners(self._accept, [listener])
        finally:
            listener.socket.close()

    async def _accept(self, stream: trio.SocketStream) -> None:
        if self._half_open >= limits.DIRECT_HALF_OPEN_MAX:
            return  # strangers have come; an agent dropped here uses the route by the controller, and dials again
        self._half_open += 1
        secure: SecureSocket | None = None
        try:
            secure = opened = self._secure(stream.socket, is_server=True)
            await secure.shake_hands(decide=lambda hello: self._decide(hello, opened))
            peer = secure.tls.peer
            connected = None if peer is None else self._expected.get(ProcId(peer.incarnation))
            if connected is not None:
                connected(secure.hand_over())
        except (LinkLost, LimitExceeded, OSError):
            return
        finally:
            self._half_open -= 1
            if secure is not None:
                secure.close()

    def _decide(self, hello: TLSHello, secure: SecureSocket) -> TLSVerdict:
        if not self._credentials.accepts(secure.tls.peer_name):
            return TLSVerdict.NAME
        is_expected = not hello.is_join and ProcId(hello.incarnation) in self._expected
        return TLSVerdict.ADMITTED if is_expected else TLSVerdict.INCARNATION

    # ---- the dialling side -----------------------------------------------------------------------------------

    async def dial(self, peer: ProcId, addresses: tuple[str, ...]) -> HostConnection:
        """Connect to an agent at the first of these addresses that reaches it.

        Raises:
            LinkLost: None of them reaches it; the message gives the reasons.
        """
        problems = list[str]()
        with trio.move_on_after(limits.DIRECT_DIAL_SECONDS):
            for address in addresses:
                try:
                    return await self._dial_one(peer, address)
                except (OSError, ValueError, LinkLost) as error:  # a malformed address counts as an unreachable one
                    problems.append(f"{address}: {next(leaves(error.__cause__ or error))}")
        if not addresses:
            problems.append("it has no address that other hosts reach")
        elif len(problems) < len(addresses):
            problems.append(f"{addresses[len(problems)]}: no answer within {limits.DIRECT_DIAL_SECONDS:g} s")
        raise LinkLost("; ".join(problems))

    async def _dial_one(self, peer: ProcId, address: str) -> HostConnection:
        host, _, port = address.rpartition(":")
        with trio.move_on_after(limits.HOST_DIAL_SECONDS):
            stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
            return await self._shake_hands(self._secure(stream.socket, is_server=False, expected=peer), peer)
        raise LinkLost(f"no answer within {limits.HOST_DIAL_SECONDS:g} s")

    async def over(self, sock: socket.socket, peer: ProcId, *, is_dialler: bool) -> HostConnection:
        """Shake hands over a connected stream socket, which this takes over.

        Raises:
            LinkLost: The other end is another agent, or not an agent.
        """
        try:
            secure = self._secure(trio.socket.from_stdlib_socket(sock), is_server=not is_dialler, expected=peer)
        except LimitExceeded as error:
            sock.close()
            raise LinkLost(str(error)) from None
        return await self._shake_hands(secure, peer)

    async def _shake_hands(self, secure: SecureSocket, peer: ProcId) -> HostConnection:
        try:
            await secure.shake_hands(decide=lambda hello: self._decide(hello, secure))
            self._check_foreign(secure.tls, peer)
            return secure.hand_over()
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from None
        finally:
            secure.close()

    def _check_foreign(self, tls: TLSSession, peer: ProcId) -> None:
        """Check a peer's name, which sessions do not check if certificates are not of the mesh (DW-1)."""
        if self._credentials.has_names:
            return
        if not self._credentials.accepts(tls.peer_name):
            raise LinkLost(f"its certificate must name one of peers=, and names {tls.peer_name!r}")
        if tls.peer is None or tls.peer.incarnation != peer:
            raise LinkLost("another incarnation answered")

    def _secure(self, sock: trio.socket.SocketType, *, is_server: bool, expected: int = 0) -> SecureSocket:
        hello = own_hello(self._own, self._mesh)
        has_names = self._credentials.has_names
        session = self._context.open(hello, is_server=is_server, expected=expected, has_names=has_names)
        return SecureSocket(sock, session)
