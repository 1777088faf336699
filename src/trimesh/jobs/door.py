"""Door: the port at which hosts join a mesh, the sessions of admitted hosts, and the life cycle of each host.

    Door        a port that is open while its block is; admits or refuses hosts
    HostLinks   the relay with the sessions of one block, and its door
    JoinedHost  one host; a subclass starts its agent (`jobs/opening.py`) or waits for it (`jobs/external_hosts.py`)

A host with a token joins: it gets a certificate, and the connection ends. A host with a certificate is a member: its
connection becomes that of its session, the first one or another one after a break. With certificates of a user's own
authority, a host shows one on both connections, and proves its token on both (`ForeignAuthority`).

JD-1 At most `limits.TLS_HALF_OPEN_MAX` connections have authenticated nothing yet. Others wait until one of them is
     through, or the oldest has taken `limits.DOOR_PATIENCE_SECONDS` and is dropped. Admitted hosts are never dropped.
JD-2 Connections that break the protocol are counted by kind of violation; each door logs only the first of a kind.
JH-1 A host holds its session from when it joins until it is released, or lost; the loss is reported once.
JH-2 The first report of its agent, its session or its spawner determines how it was lost.
"""

from __future__ import annotations

import errno
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Final

import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._native.tls import TLSContext, TLSError, TLSHello, TLSVerdict
from trimesh._runtime.hosts import AgentTable, HostSessions, RemoteHost, SessionPipe, open_remote_host
from trimesh._runtime.life import Proc
from trimesh._transport.relay import HostConnection, Relay, Session, SessionDown, SessionEnding, open_relay
from trimesh.context_managers import asynccontextmanager, contextmanager
from trimesh.errors import HostRefused, LimitExceeded, LinkLost, SpawnError
from trimesh.ids import ProcId
from trimesh.jobs.addresses import with_port
from trimesh.jobs.connections import (
    BEGINS_PLAIN,
    BEGINS_TLS,
    LENGTH,
    SPEAKS_TLS,
    ListenAddress,
    SecureSocket,
    context_of,
    own_hello,
    own_versions,
    words_of_host,
)
from trimesh.jobs.identity import PLAIN, Authority, Credentials, ForeignAuthority, IdentityError, JoinToken, TokenLedger
from trimesh.jobs.pki import OwnPKI, plain_warning
from trimesh.shape.extent import Point

_BACKLOG: Final = 128
_log: Final = logging.getLogger("trimesh")

_NO_OFFENCE: Final = frozenset({lib.ERR_TLS_CUT, lib.ERR_TLS_LATE, lib.ERR_CANCELLED})
"""Failures that are no violations: connections of admitted hosts break, too."""


class Door:
    """Open door. Made by `open_door_at`.

    Attributes:
        address: Listening address, `host:port`.
        addresses: Addresses that hosts dial, in order.
        on_stranger: Called with a message for each host whose token is not valid here. Must not raise.
        on_refused: Called with a message for each refused peer that no token identifies. Must not raise.
        offences: Number of connections that broke each rule, by the status of the failure (JD-2).
    """

    def __init__(
        self,
        own: ProcId,
        authority: Authority | ForeignAuthority,
        context: TLSContext,
        listener: trio.SocketListener,
        advertised: tuple[str, ...] = (),
    ) -> None:
        host, port, *_ = listener.socket.getsockname()
        self.address = with_port(host, port)
        self.addresses = tuple(with_port(one, port) for one in advertised) or (self.address,)
        self.on_stranger: Callable[[str], None] = lambda _: None
        self.on_refused: Callable[[str], None] = lambda _: None
        self.offences = Counter[int]()
        self._own = own
        self._authority = authority
        self._context = context
        foreign = authority.own if isinstance(authority, ForeignAuthority) else None
        is_plain = self._is_plain = foreign is not None and foreign.is_plain
        self._ledger = TokenLedger(authority.pin, keeps_spent=foreign is not None, is_plain=is_plain)
        self._expected: dict[bytes, JoinedHost] = {}
        self._members: dict[ProcId, JoinedHost] = {}
        self._half_open = dict[_Entry, None]()
        self._queued = 0
        self._turn = trio.StrictFIFOLock()

    def expect(self, guest: JoinedHost) -> JoinToken:
        """Return a token for a host that is about to join."""
        token = self._ledger.issue(time.monotonic())
        self._expected = {number: one for number, one in self._expected.items() if number in self._ledger}
        self._expected[token.number] = guest
        return token

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection, until the relay has it or it is closed; raises nothing."""
        if self._queued >= limits.DOOR_QUEUE_MAX:
            return
        await self._wait_turn()
        entry = _Entry(trio.current_time())
        self._half_open[entry] = None
        try:
            await self._meet(stream, entry)
        finally:
            self._is_through(entry)

    async def _meet(self, stream: trio.SocketStream, entry: _Entry) -> None:
        try:
            session = self._context.open(
                own_hello(self._own, self._authority.mesh),
                is_server=True,
                has_names=isinstance(self._authority, Authority),
            )
        except LimitExceeded:
            return
        secure = SecureSocket(stream.socket, session)
        try:
            with entry.scope:
                await secure.shake_hands(decide=lambda hello: self._decide(hello, secure, entry))
            if not entry.scope.cancelled_caught:
                await self._take(secure, entry)
        except LinkLost as error:
            if entry.joining is not None:
                entry.joining.refused(HostRefused(entry.refusal or str(error)))
            else:
                await self._hear_failure(secure, stream)
        finally:
            secure.close()

    async def _take(self, secure: SecureSocket, entry: _Entry) -> None:
        """Certify a host that joins, or pass the connection of a member to it."""
        hello = secure.tls.peer
        assert hello is not None
        if entry.joining is not None:
            with trio.move_on_after(limits.HOST_JOIN_SECONDS):  # it had a token: on a busy host it may be slow
                await self._certify(secure, hello, entry.joining)
        elif (guest := self._members.get(ProcId(hello.incarnation))) is not None:
            connection = secure.hand_over()
            if not guest.connected(ProcId(hello.incarnation), connection):
                connection.sock.close()
                connection.tls.free()

    async def _hear_failure(self, secure: SecureSocket, stream: trio.SocketStream) -> None:
        """Handle the end of a connection that has shown no token."""
        failure = secure.tls.failure
        if (words := words_of_host(secure.first)) is not None:
            self.on_refused(f"a host without a token reports that it cannot join: {words}")
        elif failure is not None and failure.status not in _NO_OFFENCE:
            self._count_offence(failure)
            if secure.first.startswith(BEGINS_TLS if self._is_plain else BEGINS_PLAIN):
                await self._refuse_other_kind(stream)

    async def _refuse_other_kind(self, stream: trio.SocketStream) -> None:
        """Report to both sides that only one uses TLS; other strangers get no reply."""
        theirs, ours = ("with", "has none (insecure=)") if self._is_plain else ("without", "requires it")
        self.on_refused(f"a peer connected {theirs} TLS, and this door {ours}: give hosts tokens of this door")
        if not self._is_plain:
            with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(SPEAKS_TLS)

    async def _wait_turn(self) -> None:
        """Wait for room for one more unauthenticated connection (JD-1)."""
        self._queued += 1
        try:
            async with self._turn:  # wakes only the first in the queue: waking a thousand would stall the program
                while len(self._half_open) >= limits.TLS_HALF_OPEN_MAX:
                    oldest = next(iter(self._half_open))
                    with trio.move_on_at(oldest.came_at + limits.DOOR_PATIENCE_SECONDS):
                        await oldest.through.wait()
                    if not oldest.through.is_set():
                        oldest.scope.cancel(reason="others wait")
                        await oldest.through.wait()
        finally:
            self._queued -= 1

    def _is_through(self, entry: _Entry) -> None:
        self._half_open.pop(entry, None)
        entry.through.set()

    def _decide(self, hello: TLSHello, secure: SecureSocket, entry: _Entry) -> TLSVerdict:
        if entry.scope.cancel_called:
            return TLSVerdict.FULL  # it is being dropped: its token stays valid for its next attempt
        self._is_through(entry)
        incarnation = ProcId(hello.incarnation)
        if isinstance(self._authority, ForeignAuthority):
            if self._authority.has_joined(incarnation):
                return self._decide_again(hello, secure)
            if not hello.is_join:
                return TLSVerdict.TOKEN
        elif not hello.is_join:
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
        entry.refusal = self._why_not_named(secure.tls.peer_name)
        if entry.refusal is not None:
            return TLSVerdict.NAME
        entry.refusal = difference(hello.versions, own_versions())
        return TLSVerdict.ADMITTED if entry.refusal is None else TLSVerdict.VERSIONS

    def _decide_again(self, hello: TLSHello, secure: SecureSocket) -> TLSVerdict:
        """Decide on an incarnation that has joined: its token proves that, as its certificate does not (TK-4)."""
        incarnation, exporter = ProcId(hello.incarnation), secure.tls.exporter
        if incarnation not in self._members:
            return TLSVerdict.INCARNATION
        if not self._ledger.is_again(hello.token, hello.proof, exporter=exporter, incarnation=incarnation):
            return TLSVerdict.TOKEN
        return TLSVerdict.ADMITTED if self._why_not_named(secure.tls.peer_name) is None else TLSVerdict.NAME

    def _why_not_named(self, name: str | None) -> str | None:
        """Return why a peer may not have the name in its certificate; None if it may, or sessions check that."""
        if not isinstance(self._authority, ForeignAuthority) or self._authority.own.accepts(name):
            return None
        peers = ", ".join(self._authority.own.peers)
        return f"its certificate must name one of peers=, {peers}, and names {name!r}"

    def _count_offence(self, failure: TLSError) -> None:
        self.offences[failure.status] += 1
        if self.offences[failure.status] == 1:
            text = "a connection to %s was refused: %s. Further ones of this kind are counted, not logged"
            _log.warning(text, self.address, failure)

    async def _certify(self, secure: SecureSocket, hello: TLSHello, guest: JoinedHost) -> None:
        incarnation = ProcId(hello.incarnation)
        if isinstance(self._authority, ForeignAuthority):
            try:
                self._authority.admit(incarnation)
            except (IdentityError, LimitExceeded) as error:
                guest.refused(HostRefused(str(error)))
                return
            self._members[incarnation] = guest
            await secure.send(LENGTH.pack(0))
            return
        size = LENGTH.unpack(await secure.receive_exactly(LENGTH.size))[0]
        if size > limits.KEY_REQUEST_BYTES_MAX:
            most = f"limits.KEY_REQUEST_BYTES_MAX ({limits.KEY_REQUEST_BYTES_MAX})"
            guest.refused(HostRefused(f"a request for a certificate must have at most {most} bytes, got {size}"))
            return
        try:
            chain = self._authority.certify(await secure.receive_exactly(size), incarnation, time.time())
        except (IdentityError, LimitExceeded) as error:
            guest.refused(HostRefused(str(error)))
            return
        self._members[incarnation] = guest
        await secure.send(LENGTH.pack(len(chain)) + chain)

    def forget(self, incarnation: ProcId) -> None:
        """Stop admitting a member: its session is over."""
        self._members.pop(incarnation, None)
        self._ledger.forget(incarnation)


class _Entry:
    """Connection that is not authenticated yet, or has just been admitted."""

    def __init__(self, came_at: float) -> None:
        self.came_at = came_at
        self.scope = trio.CancelScope()  # of its handshake
        self.through = trio.Event()  # set when it is admitted, or has ended
        self.joining: JoinedHost | None = None
        self.refusal: str | None = None


def difference(theirs: tuple[str, str, str], ours: tuple[str, str, str]) -> str | None:
    """Return why two programs are incompatible, naming both sides; None if they are compatible.

    Versions of trimesh must be equal, of Python in the first two numbers, of torch if both have loaded it.
    """
    found = list[str]()
    for name, host, program, digits in (
        ("trimesh", theirs[0], ours[0], None),
        ("Python", theirs[1], ours[1], 2),
        ("torch", theirs[2], ours[2], None),
    ):
        if host and program and host.split(".")[:digits] != program.split(".")[:digits]:
            found.append(f"{name} {host} where this program runs {name} {program}")
    if not found:
        return None
    return f"the host runs {', and '.join(found)}: install the same version there"


@contextmanager
def door_context(own: ProcId, authority: Authority | ForeignAuthority) -> Generator[TLSContext, None, None]:
    """Certify this process for a door; left when all its sessions have been freed."""
    credentials = authority.credentials(own, time.time())
    context = context_of(credentials, takes_joins=credentials.has_names)  # joining hosts have no certificate yet
    try:
        yield context
    finally:
        context.close()


@asynccontextmanager
async def open_door_at(
    place: ListenAddress, own: ProcId, authority: Authority | ForeignAuthority, context: TLSContext
) -> AsyncGenerator[Door, None]:
    """Listen while the body runs. `context` outlives the door and the sessions of its hosts.

    Raises:
        SpawnError: It cannot listen there.
    """
    try:
        listeners = await trio.open_tcp_listeners(place.port, host=place.interface, backlog=_BACKLOG)
    except OSError as error:
        where = with_port(place.interface, place.port)
        if error.errno == errno.EADDRINUSE:
            raise SpawnError(
                f"hosts cannot join at {where}: another program listens at port {place.port}; pass a free one by "
                "port=, or leave it out"
            ) from error
        if error.errno == errno.EACCES:
            raise SpawnError(
                f"hosts cannot join at {where}: this user may not listen at port {place.port}; pass one from 1024 on"
            ) from error
        raise SpawnError(f"hosts cannot join at {where}, which must be an address of this machine: {error}") from error
    door = Door(own, authority, context, listeners[0], place.advertised)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve, door, listeners)
        yield door
        nursery.cancel_scope.cancel(reason="the door is closed")


async def _serve(door: Door, listeners: list[trio.SocketListener]) -> None:
    """Serve until cancelled, which closes the listeners."""
    await trio.serve_listeners(door.serve, listeners)


class HostLinks:
    """Sessions of one block with its hosts, and the door where they join. Made by `open_host_links`."""

    def __init__(self, relay: Relay, sessions: HostSessions, door: Door, *, is_plain: bool) -> None:
        self.door = door
        self.is_plain = is_plain
        self.agents = AgentTable()
        self._relay = relay
        self._sessions = sessions
        self._holders: dict[Session, JoinedHost] = {}
        sessions.on_down = self._down

    def begin(self, incarnation: ProcId, holder: JoinedHost) -> SessionPipe:
        """Begin the session of a host that has joined; return the pipe that carries its records."""
        pipe = self._sessions.begin(self._relay, incarnation, is_dialler=False, lease_seconds=limits.HOST_LEASE_SECONDS)
        self._holders[pipe.session] = holder
        return pipe

    def end(self, pipe: SessionPipe) -> None:
        """End a session at once; its holder gets no more events."""
        self._holders.pop(pipe.session, None)
        self._sessions.end(pipe)

    def _down(self, down: SessionDown) -> None:
        holder = self._holders.pop(down.session, None)
        if holder is not None:
            holder.session_down(down)


async def own_credentials(pki: OwnPKI | None, insecure: str, whose: str) -> Credentials | None:
    """Return this process's credentials for `pki` or `insecure`; None if the mesh makes its certificates.

    Logs a warning if the job or door `whose` is insecure.

    Raises:
        IdentityError: A file cannot be read.
    """
    if insecure:
        _log.warning("%s", plain_warning(whose))
        return PLAIN
    return None if pki is None else await trio.to_thread.run_sync(pki.read)


@asynccontextmanager
async def open_host_links(
    proc: Proc, place: ListenAddress, own: Credentials | None = None
) -> AsyncGenerator[HostLinks, None]:
    """Accept hosts while the body runs; see `own_credentials` for `own`."""
    authority = Authority(time.time()) if own is None else ForeignAuthority(own)
    with door_context(proc.proc_id, authority) as context:
        sessions = HostSessions()
        async with (
            open_relay(sessions.take) as relay,
            open_door_at(place, proc.proc_id, authority, context) as door,
        ):
            yield HostLinks(relay, sessions, door, is_plain=own is not None and own.is_plain)


class JoinedHost(ABC):
    """Host for which a token was issued. A subclass handles its events.

    Attributes:
        name: Name of the host; "" until the host has reported it.
        host: Starts processes there; None until its agent has joined.
        is_ready: True once processes can be started.
        joined: Set when it has a session.
        lost: Set when it is lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.host: RemoteHost | None = None
        self.is_ready = False
        self.joined = trio.Event()
        self.lost = trio.Event()
        self._links: HostLinks
        self._pipe: SessionPipe | None = None
        self._incarnation = ProcId(0)
        self._is_over = False

    # ---- events for subclasses -------------------------------------------------------------------------------

    def came(self) -> bool:
        """Handle that it has joined; return whether it is still wanted."""
        return True

    @abstractmethod
    def became_ready(self) -> None:
        """Handle that processes can be started there."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Handle that it cannot be used."""

    # ---- events of the door ----------------------------------------------------------------------------------

    def refused(self, error: Exception) -> None:
        """Handle the refusal of its join."""
        self.failed(HostRefused(f"the host {self.name or 'with this token'} may not join: {error}"))

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        """Take a connection of the member; return False to close it: its session is over."""
        if self._is_over or (self._pipe is None and not self.came()):
            return False
        if self._pipe is None:
            self._incarnation = incarnation
            self._pipe = self._links.begin(incarnation, self)
            self.joined.set()
        self._pipe.session.attach(connection)
        return True

    # ---- life cycle ------------------------------------------------------------------------------------------

    async def keep(self, proc: Proc, point: Point, release: trio.Event) -> None:
        """Keep it as a host until it is released or lost; then end its processes."""
        await self.joined.wait()
        assert self._pipe is not None
        async with open_remote_host(proc, self._pipe, self.name, point, self._links.agents) as host:
            self.host = host
            host.on_agent_failed = self.agent_failed
            try:
                await host.wait_ready()
            except SpawnError as error:
                self.failed(error)
                return
            self.name = host.name
            self.is_ready = True
            if self._links.is_plain:
                proc.plain_hosts.add(host.name)
            self.became_ready()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_then_cancel, self.lost, nursery.cancel_scope)
                    await release.wait()
                    nursery.cancel_scope.cancel()
            finally:
                proc.plain_hosts.discard(host.name)

    def agent_failed(self, text: str) -> None:
        """Handle the end of its agent, past or imminent; `text` is from the agent or its connection."""
        self.lose("agent exit", text)

    def session_down(self, down: SessionDown) -> None:
        """Handle the end of its session."""
        match down.ending:
            case SessionEnding.LEASE:
                seconds = f"limits.HOST_LEASE_SECONDS ({limits.HOST_LEASE_SECONDS:g} s)"
                self.lose("lease", f"its agent sent nothing for {seconds}")
            case SessionEnding.BYE:
                self.agent_failed("its agent has ended")
            case _:
                self.lose(down.ending.value, down.reason)

    def lose(self, reason: str, text: str) -> None:
        """Mark it as lost; see `HostLost.reason`."""
        if self.lost.is_set():
            return
        self._is_over = True
        self.lost.set()
        if not self.is_ready:
            self.failed(SpawnError(f"the host {self.name} was lost before it was ready: {text}"))
        else:
            assert self.host is not None
            self.host.lose(reason, text)

    def close(self) -> None:
        """Stop admitting its agent, and end its session."""
        self._is_over = True
        self._links.door.forget(self._incarnation)
        if self._pipe is not None:
            self._links.end(self._pipe)


async def _then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
