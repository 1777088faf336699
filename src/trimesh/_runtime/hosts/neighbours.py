r"""Sessions between two agents, direct or relayed by the controller.

A session begins when processes of the two hosts are first linked, or when one agent feeds the other, that is, sends it
the bodies of a multicast.

    Connect, Arriving, Listening or a feed names another agent --> a session with channels, not connected yet
        the agent with the larger id:  listens, and reports its addresses through the controller
        the agent with the smaller id: dials these addresses --> direct
            \-- none answers, and processes are to be linked --> a tunnel through the controller, TLS inside --> relayed
    a broken connection, or a newly possible path, only changes the connection of the same session

NB-1 Two agents have one session, however many processes are linked. Their ids decide which of them dials. A session
     survives a change of addresses: an address is only used to dial the next connection.
NB-2 Bytes are numbered in the session: none is lost, duplicated or reordered when the path changes.
NB-3 Only the controller declares hosts lost: then the session ends at once, and none begins with that agent again. An
     agent that does not answer is dialled until then, or until the lease of the session is over.
NB-4 Each request whose answer is to arrive over a session gets one: `ConnectFailed` if the session ends first.
NB-5 A session for feeds alone is never relayed: the controller can send the bodies itself.
NB-6 An agent listens only while it has a session in which the other agent dials.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.hosts.host_group import HostSessions
from trimesh._runtime.hosts.remote_host import SessionPipe
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.system.records import Arriving, CastFeed, Listening, Parted, Relayed, Tunnel
from trimesh._transport.relay import HostConnection, Relay, Session
from trimesh.errors import LimitExceeded, LinkLost, ProtocolError
from trimesh.ids import ID_MAX, ProcId

if TYPE_CHECKING:
    from trimesh.jobs.connections import DirectWays

Connected = Callable[[HostConnection], None]
"""Callback that receives an authenticated connection from another agent."""


_Report = Callable[[wire.AnyRecord, tuple[int, ...]], object]
"""Callback that sends a record with descriptors to the controller, and then owns the descriptors."""
_TakeAnswer = Callable[[wire.Answer, tuple[int, ...]], None]
"""Callback that receives the answer to a request of this host and owns its descriptors; drops unexpected answers."""
_TakeFeed = Callable[[ProcId, int, socket.socket], None]
"""Callback that receives the channel of a feed: sending agent, number of the multicast, socket (owned by it)."""


class _Neighbour:
    """Session with another agent.

    Attributes:
        peer: Process id of the other agent.
        pipe: Channels of the session.
        is_dialler: Whether this side dials.
        addresses: Addresses at which the other agent listens, once received.
        addressed: Set once they are received.
        interrupted: Set when the session has lost its connection.
        is_relayed: Whether the connection is a tunnel through the controller.
        is_relay_reported: Whether the controller was notified that the session is relayed.
        linked: Set once the session links processes, not only agents for feeds (NB-5).
        tried: Set once the session was connected, or the first direct connection failed.
        awaited: Numbers of the requests to be answered over the session (NB-4).
        scope: Cancelling it ends the session.
    """

    def __init__(self, peer: ProcId, pipe: SessionPipe, *, is_dialler: bool) -> None:
        self.peer = peer
        self.pipe = pipe
        self.is_dialler = is_dialler
        self.addresses: tuple[str, ...] = ()
        self.addressed = trio.Event()
        self.interrupted = trio.Event()
        self.is_relayed = False
        self.is_relay_reported = False
        self.linked = trio.Event()
        self.tried = trio.Event()
        self.awaited = set[int]()
        self.scope = trio.CancelScope()

    def attach(self, connection: HostConnection, *, is_relayed: bool = False) -> None:
        """Continue the session over a connection."""
        self.is_relayed = is_relayed
        self.pipe.session.attach(connection)
        self.tried.set()


class Neighbours:
    """All sessions of an agent with other agents.

    Args:
        sessions, relay: Create and run sessions.
        own: Process id of this agent.
        ways: Dials other agents, and listens for them.
    """

    def __init__(self, sessions: HostSessions, relay: Relay, own: ProcId, ways: DirectWays) -> None:
        self._sessions = sessions
        self._relay = relay
        self._own = own
        self._ways = ways
        self._known: dict[ProcId, _Neighbour] = {}
        self._of_session: dict[Session, _Neighbour] = {}
        self._lost = set[ProcId]()
        self._tell: _Report = _drop
        self._answered: _TakeAnswer = _drop
        self._fed: _TakeFeed = _close
        self._nursery: trio.Nursery | None = None

    async def serve(self, tell: _Report, answered: _TakeAnswer, fed: _TakeFeed) -> None:
        """Run the sessions until cancelled; none begins before.

        Args:
            tell: Receives reports to the controller.
            answered: Receives answers to requests of this host.
            fed: Receives feeds of other agents.
        """
        self._tell, self._answered, self._fed = tell, answered, fed
        try:
            async with trio.open_nursery() as self._nursery:
                await trio.sleep_forever()
        finally:
            self._nursery = None

    # ---- requests of the agent -------------------------------------------------------------------------------

    def give(self, peer: ProcId, answer: wire.Connected, fd: int) -> bool:
        """Send one end of a link to another agent; return False, without closing `fd`, if there can be no session.

        Raises:
            LimitExceeded: The session has too many channels; `fd` is closed.
        """
        one = self._with(peer)
        if one is None:
            return False
        one.linked.set()
        one.pipe.put(answer, (fd,))
        return True

    async def meet(self, peer: ProcId) -> bool:
        """Begin a session with an agent unless there is one; return whether it is connected directly."""
        one = self._with(peer)
        if one is None:
            return False
        await one.tried.wait()
        return one.pipe.session.is_connected and not one.is_relayed

    def open_feed(self, peer: ProcId, number: int, fd: int) -> bool:
        """Open a channel that feeds an agent from a socket; return False, without closing `fd`, if there is no session.

        Raises:
            LimitExceeded: There are too many channels; `fd` is closed.
        """
        one = self._known.get(peer)
        if one is None:
            return False
        one.pipe.put(CastFeed(number), (fd,))
        return True

    def take(self, received: Received) -> None:
        """Handle a record from the controller about another agent."""
        record = received.record
        match record:
            case Arriving(request=request, agent=agent):
                one = self._with(ProcId(agent))
                if one is None:
                    self._answered(wire.ConnectFailed(request, "there is no session with its host"), ())
                else:
                    one.linked.set()
                    one.awaited.add(request)
            case Listening(agent=agent, addresses=addresses):
                one = self._with(ProcId(agent))
                if one is not None:
                    one.addresses = addresses
                    one.addressed.set()
            case Tunnel(agent=agent):
                self._take_tunnel(ProcId(agent), received.fds)
                return
            case Parted(agent=agent, is_lost=is_lost):
                self._part(ProcId(agent), is_lost=is_lost)
            case _:
                raise AssertionError(record)
        close_all(received.fds)

    def interrupted(self, session: Session) -> None:
        """Handle the loss of a session's connection."""
        one = self._of_session.get(session)
        if one is not None:
            one.interrupted.set()

    # ---- one session -----------------------------------------------------------------------------------------

    def _with(self, peer: ProcId) -> _Neighbour | None:
        """Return the session with an agent, beginning one if there is none; None if there can be none."""
        one = self._known.get(peer)
        if one is not None or self._nursery is None or peer in self._lost or peer == self._own:
            return one
        is_dialler = self._own < peer
        number = secrets.randbelow(ID_MAX) + 1 if is_dialler else 0
        lease = limits.DIRECT_LEASE_SECONDS
        try:
            pipe = self._sessions.begin(
                self._relay, peer, is_dialler=is_dialler, lease_seconds=lease, session_id=number
            )
        except (LimitExceeded, OSError):
            return None
        one = self._known[peer] = self._of_session[pipe.session] = _Neighbour(peer, pipe, is_dialler=is_dialler)
        if not is_dialler:
            self._expect(one)
        self._nursery.start_soon(self._serve, one)
        return one

    @trio.lowlevel.enable_ki_protection
    async def _serve(self, one: _Neighbour) -> None:
        try:
            with one.scope:
                async with trio.open_nursery() as nursery:
                    if one.is_dialler:
                        nursery.start_soon(self._connect, one)
                    await self._read(one)
                    nursery.cancel_scope.cancel(reason="the session is over")
        finally:
            self._end(one)

    async def _read(self, one: _Neighbour) -> None:
        """Receive answers and feeds over the session until it ends."""
        try:
            while True:
                received = one.pipe.receive()
                if received is None:
                    await one.pipe.wait_readable()
                    continue
                record = received.record
                if isinstance(record, CastFeed):
                    if received.fds:  # else there is no descriptor left, and the channel has ended
                        self._fed(one.peer, record.number, socket.socket(fileno=received.fds[0]))
                    continue
                if not isinstance(record, wire.Connected):
                    close_all(received.fds)
                    raise ProtocolError(f"an agent may send Connected and CastFeed, got {type(record).__name__}")
                one.awaited.discard(record.request)
                if received.fds:
                    self._answered(record, received.fds)
                else:
                    self._answered(wire.ConnectFailed(record.request, "the agent has no descriptor left"), ())
        except (OSError, ProtocolError):
            self._tell(Parted(one.peer, is_lost=False), ())  # the other side must end the session, too

    def _part(self, peer: ProcId, *, is_lost: bool) -> None:
        if is_lost:
            self._lost.add(peer)
        one = self._known.get(peer)
        if one is not None:
            one.pipe.session.abort()  # at once: its links must end before anything else is read (NB-3)
            self._forget(one)
            one.scope.cancel(reason="the other host is lost, or its session")

    def _forget(self, one: _Neighbour) -> None:
        """Remove a session, so that the next request begins a new one. Idempotent."""
        if self._known.get(one.peer) is one:
            del self._known[one.peer], self._of_session[one.pipe.session]
            self._ways.forget(one.peer)

    def _end(self, one: _Neighbour) -> None:
        self._forget(one)
        one.tried.set()
        self._sessions.end(one.pipe)
        for request in one.awaited:
            self._answered(wire.ConnectFailed(request, "the session with its host is over"), ())

    # ---- listening side --------------------------------------------------------------------------------------

    def _expect(self, one: _Neighbour) -> None:
        addresses = self._ways.listen_for(one.peer, one.attach)
        self._tell(Listening(one.peer, addresses), ())
        if not addresses:
            one.tried.set()

    def _take_tunnel(self, peer: ProcId, fds: tuple[int, ...]) -> None:
        one = self._with(peer)
        if one is None or one.is_dialler or len(fds) != 1 or self._nursery is None:
            close_all(fds)
        else:
            self._nursery.start_soon(self._accept_tunnel, one, socket.socket(fileno=fds[0]))

    @trio.lowlevel.enable_ki_protection
    async def _accept_tunnel(self, one: _Neighbour, sock: socket.socket) -> None:
        try:
            connection = await self._ways.over(sock, one.peer, is_dialler=False)
        except LinkLost:
            return  # the other side dials again
        one.attach(connection, is_relayed=True)

    # ---- dialling side ---------------------------------------------------------------------------------------

    async def _connect(self, one: _Neighbour) -> None:
        """Keep the session connected: directly if possible, else through the controller."""
        session = one.pipe.session
        await one.addressed.wait()
        patience = limits.DIRECT_RETRY_SECONDS
        while True:
            failure = await self._dial(one)
            if failure is not None and not session.is_connected:
                one.tried.set()
                if one.linked.is_set():  # NB-5
                    await self._tunnel(one, failure)
            while session.is_connected and not one.is_relayed:
                patience = limits.DIRECT_RETRY_SECONDS
                await self._wait_interrupted(one, math.inf)
            if session.is_connected:
                await self._wait_interrupted(one, patience if one.addresses else math.inf)
                patience = min(2 * patience, limits.DIRECT_RETRY_SECONDS_MAX)
            elif one.linked.is_set():
                await trio.sleep(limits.HOST_REDIAL_SECONDS)
            else:
                with trio.move_on_after(patience):
                    await one.linked.wait()
                patience = min(2 * patience, limits.DIRECT_RETRY_SECONDS_MAX)

    async def _wait_interrupted(self, one: _Neighbour, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await one.interrupted.wait()
        one.interrupted = trio.Event()

    async def _dial(self, one: _Neighbour) -> str | None:
        """Connect directly; return the reason of a failure, None on success."""
        try:
            connection = await self._ways.dial(one.peer, one.addresses)
        except LinkLost as error:
            return str(error)
        one.attach(connection)
        return None

    async def _tunnel(self, one: _Neighbour, failure: str) -> None:
        """Connect through the controller; report it once, with the `failure` of the direct connection."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # out of descriptors; `_connect` tries again
            return
        self._tell(Tunnel(one.peer), (theirs.detach(),))
        try:
            connection = await self._ways.over(ours, one.peer, is_dialler=True)
        except LinkLost:
            return
        one.attach(connection, is_relayed=True)
        if not one.is_relay_reported:
            one.is_relay_reported = True
            self._tell(Relayed(one.peer, failure[: limits.REASON_CHARS_MAX]), ())


def _close(peer: ProcId, number: int, sock: socket.socket) -> None:
    del peer, number
    sock.close()


def _drop(record: wire.AnyRecord, fds: tuple[int, ...]) -> None:
    del record
    close_all(fds)
