"""Where hosts join a mesh: a port that is open while its block is, and who is let in.

A host that has a token joins: it gets a certificate, and that is all. A host that has a certificate is a member: its
connection becomes that of its session, the first one or another one after a break.
"""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._native.tls import TLSContext, TLSHello, TLSVerdict
from trimesh._transport.relay.base import HostConnection
from trimesh.errors import HostRefused, LimitExceeded, LinkLost, SpawnError
from trimesh.ids import ProcId
from trimesh.jobs.handshake import SecureSocket, own_hello, own_versions
from trimesh.jobs.identity import Authority, IdentityError, JoinToken, TokenLedger

LENGTH: Final = struct.Struct("<I")
_BACKLOG: Final = 128


class DoorPlace(msgspec.Struct, frozen=True):
    """Where a door listens, and what hosts are told of that.

    Attributes:
        interface: Number of an address of this machine.
        port: 0 lets the system choose.
        advertised: What hosts dial, `host` or `host:port`, where it is another address than that: a gateway, a name.
    """

    interface: str
    port: int = 0
    advertised: tuple[str, ...] = ()


class DoorGuest(Protocol):
    """Who a token was issued for."""

    def refused(self, error: Exception) -> None:
        """Learn that it came, and may not join."""

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        """Take a connection of a member; return False to close it: its session is over."""
        ...


class Door:
    """One open door. Made by `open_door_at`.

    Attributes:
        address: `host:port`, where it listens.
        addresses: What hosts dial, in order.
        on_stranger: Called with words for each host whose token is worth nothing here. Must not raise.
    """

    def __init__(
        self,
        own: ProcId,
        authority: Authority,
        context: TLSContext,
        listener: trio.SocketListener,
        advertised: tuple[str, ...] = (),
    ) -> None:
        host, port = listener.socket.getsockname()[:2]
        self.address = _with_port(host, port)
        self.addresses = tuple(_with_port(one, port) for one in advertised) or (self.address,)
        self.on_stranger: Callable[[str], None] = lambda _: None
        self._own = own
        self._authority = authority
        self._context = context
        self._ledger = TokenLedger(authority.pin)
        self._expected: dict[bytes, DoorGuest] = {}
        self._members: dict[ProcId, DoorGuest] = {}

    def expect(self, guest: DoorGuest) -> JoinToken:
        """Return a token for a host that is about to join."""
        token = self._ledger.issue(time.monotonic())
        self._expected = {number: one for number, one in self._expected.items() if number in self._ledger}
        self._expected[token.number] = guest
        return token

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection, until the relay has it or it is closed; raises nothing."""
        try:
            session = self._context.open(own_hello(self._own, self._authority.mesh), is_server=True)
        except LimitExceeded:
            await stream.aclose()
            return
        secure = SecureSocket(stream.socket, session)
        entry = _Entry()
        try:
            await secure.shake_hands(decide=lambda hello: self._decide(hello, secure, entry))
            hello = secure.tls.peer
            assert hello is not None
            if entry.joining is not None:
                with trio.move_on_after(limits.TLS_HALF_OPEN_MS / 1000):
                    await self._certify(secure, hello, entry.joining)
            elif (guest := self._members.get(ProcId(hello.incarnation))) is not None:
                connection = secure.hand_over()
                if not guest.connected(ProcId(hello.incarnation), connection):
                    connection.sock.close()
                    connection.tls.free()
        except LinkLost as error:
            if entry.refusal is not None and entry.joining is not None:
                entry.joining.refused(HostRefused(entry.refusal))
            elif entry.joining is not None:
                entry.joining.refused(HostRefused(str(error)))
        finally:
            secure.close()

    def _decide(self, hello: TLSHello, secure: SecureSocket, entry: _Entry) -> TLSVerdict:
        incarnation = ProcId(hello.incarnation)
        if not hello.is_join:
            return TLSVerdict.ADMITTED if incarnation in self._members else TLSVerdict.INCARNATION
        is_known = self._ledger.redeem(
            hello.token,
            hello.proof,
            exporter=secure.tls.exporter,
            incarnation=incarnation,
            now=time.monotonic(),
        )
        guest = self._expected.pop(hello.token, None) if is_known else None
        if guest is None:
            self.on_stranger(self._ledger.why_refused(hello.token))
            return TLSVerdict.TOKEN
        entry.joining = guest
        entry.refusal = difference(hello.versions, own_versions())
        return TLSVerdict.ADMITTED if entry.refusal is None else TLSVerdict.VERSIONS

    async def _certify(self, secure: SecureSocket, hello: TLSHello, guest: DoorGuest) -> None:
        incarnation = ProcId(hello.incarnation)
        size = LENGTH.unpack(await secure.receive_exactly(LENGTH.size))[0]
        if size > limits.KEY_REQUEST_BYTES_MAX:
            guest.refused(HostRefused(f"a request for a certificate of {size} bytes came; it has 400"))
            return
        try:
            chain = self._authority.certify(await secure.receive_exactly(size), incarnation, time.time())
        except (IdentityError, LimitExceeded) as error:
            guest.refused(HostRefused(str(error)))
            return
        self._members[incarnation] = guest
        await secure.send(LENGTH.pack(len(chain)) + chain)

    def forget(self, incarnation: ProcId) -> None:
        """Let a member in no more: its session is over."""
        self._members.pop(incarnation, None)


class _Entry:
    """What has become of one hello."""

    def __init__(self) -> None:
        self.joining: DoorGuest | None = None
        self.refusal: str | None = None


def _with_port(host: str, port: int) -> str:
    """Return `host:port`; a port that is there stays."""
    if host.startswith("[") or host.count(":") == 1:
        return host if not host.endswith("]") else f"{host}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def difference(theirs: tuple[str, str, str], ours: tuple[str, str, str]) -> str | None:
    """Return why two programs do not fit, naming both sides; None if they do.

    trimesh must be the same, Python in its first two numbers, torch the same where both have loaded it.
    """
    found = list[str]()
    for name, host, program, digits in (
        ("trimesh", theirs[0], ours[0], 9),
        ("Python", theirs[1], ours[1], 2),
        ("torch", theirs[2], ours[2], 9),
    ):
        if host and program and host.split(".")[:digits] != program.split(".")[:digits]:
            found.append(f"{name} {host} where this program runs {name} {program}")
    if not found:
        return None
    return f"the host runs {', and '.join(found)}: install the same versions there"


@contextmanager
def door_context(own: ProcId, authority: Authority) -> Generator[TLSContext, None, None]:
    """Certify this process for a door; left when all its sessions have been freed."""
    credentials = authority.credentials(own, time.time())
    context = TLSContext(
        chain=credentials.chain, key=credentials.key, authority=credentials.authority, takes_joins=True
    )
    try:
        yield context
    finally:
        context.close()


@asynccontextmanager
async def open_door_at(
    place: DoorPlace, own: ProcId, authority: Authority, context: TLSContext
) -> AsyncGenerator[Door, None]:
    """Listen while the body runs.

    Args:
        place: Where.
        own: This process.
        authority: Of its mesh.
        context: With the certificate of this process; outlives the door, and the sessions of those who came in.

    Raises:
        SpawnError: It cannot listen there.
    """
    try:
        listeners = await trio.open_tcp_listeners(place.port, host=place.interface, backlog=_BACKLOG)
    except OSError as error:
        where = _with_port(place.interface, place.port)
        raise SpawnError(f"hosts cannot join at {where}, which must be an address of this machine: {error}") from error
    door = Door(own, authority, context, listeners[0], place.advertised)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, door, listeners)
            yield door
            nursery.cancel_scope.cancel(reason="the door is closed")
    finally:
        with trio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()


async def _serve(door: Door, listeners: list[trio.SocketListener]) -> None:
    await trio.serve_listeners(door.serve, listeners)
