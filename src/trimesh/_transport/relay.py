"""Interface of a session between two hosts; the native library implements it.

    relay = open_relay(on_event)                      # async with: owns all sessions
    session = relay.open_session(...)                 # before there is a connection
    session.attach(connection)                        # TLS is open; a new connection replaces an older one
    number = session.open_channel(sock, purpose)      # one end of a socket pair, whose bytes the session carries
    session.accept_channel(number, sock)              # answer to `OpenedChannel`; or refuse_channel(number)

Channel 0 exists from the start; its socket is passed to `open_session`. Every other channel is opened by one side with
a *purpose*, bytes for the floors above. The end of a socket (EOF, reset) is passed on to the other end.

Events arrive in Trio's thread, one after the other, never while a method of the relay runs.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import trio

from trimesh import limits
from trimesh._native import lib as status
from trimesh._native.lib import Library, load
from trimesh._native.tls import TLSSession
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId


class SessionEnding(Enum):
    """Why a session is down."""

    LEASE = "lease"
    """Nothing arrived for the duration of the lease, with or without a connection."""

    BYE = "bye"
    """The peer closed it; everything sent before has arrived."""

    CLOSED = "closed"
    """This side closed it, and the peer has received everything sent before."""

    PROTOCOL = "protocol"
    """The peer broke a rule of the session; the reason names it."""


class HostConnection(NamedTuple):
    """Connection whose TLS session is open; the session takes ownership of all fields.

    Attributes:
        sock: Connected, non-blocking.
        tls: In state OPEN.
        wire: Bytes received from the socket that TLS has not consumed yet.
        plain: Bytes that TLS decrypted after the hello.
    """

    sock: socket.socket
    tls: TLSSession
    wire: bytes = b""
    plain: bytes = b""


class OpenedChannel(NamedTuple):
    """The peer has opened a channel, to be accepted or refused, now or later. Bytes that arrive meanwhile are kept."""

    session: Session
    channel: int
    purpose: bytes


class SessionResumed(NamedTuple):
    """The peer has resumed the session on a new connection; bytes that it has not received are sent again."""

    session: Session


class SessionInterrupted(NamedTuple):
    """The connection broke, and the session lives: the dialling side dials again, the other one waits."""

    session: Session
    reason: str


class SessionDown(NamedTuple):
    """The session is over and all its sockets are closed. The last event of a session, exactly once."""

    session: Session
    ending: SessionEnding
    reason: str


class ChannelEnded(NamedTuple):
    """Both directions of a channel have ended, or it was reset; its socket is closed. Not sent for channel 0."""

    session: Session
    channel: int


SessionEvent = OpenedChannel | SessionResumed | SessionInterrupted | SessionDown | ChannelEnded
OnEvent = Callable[[SessionEvent], None]
"""Called for each event; must not raise."""


class Statistics(NamedTuple):
    """Counters of a session since it began.

    Attributes:
        connections: Connections that it was given.
        frames_sent, frames_received: Numbered frames, each counted once.
        bytes_sent, bytes_received: Bytes of channels.
        resent: Frames sent again after a connection broke.
        duplicates: Frames that arrived again, and were dropped.
        unacknowledged: Bytes kept for resending.
        channels: Number of open channels.
    """

    connections: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    resent: int
    duplicates: int
    unacknowledged: int
    channels: int


class Session(Protocol):
    """One session; see `Relay.open_session`."""

    @property
    def peer(self) -> ProcId:
        """The incarnation at the other end."""
        ...

    @property
    def is_connected(self) -> bool:
        """True if there is a connection, as far as known."""
        ...

    def attach(self, connection: HostConnection) -> None:
        """Replace the connection, if there is one, at once; never blocks. If the session is down, it is closed."""

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        """Connect a socket to a new channel; never blocks.

        Args:
            sock: A connected stream socket; the session owns it from now on.
            purpose: At most `limits.HOST_PURPOSE_BYTES_MAX`; the peer gets it with `OpenedChannel`.

        Returns:
            The number of the channel; 0 if the session is down, then the socket is closed at once.

        Raises:
            LimitExceeded: `limits.HOST_CHANNELS_MAX` are open, or the purpose is too long; the socket is the caller's.
        """
        ...

    def accept_channel(self, channel: int, sock: socket.socket) -> None:
        """Connect a socket, which the session then owns, to a channel of the peer. If that has ended, it is closed."""

    def refuse_channel(self, channel: int) -> None:
        """Reset a channel that the peer has opened. No effect if it has ended."""

    def drop_connection(self) -> None:
        """Close the connection, as if it had broken; the session lives. For tests, and for a new address."""

    def close(self) -> None:
        """Send BYE after all accepted bytes; `SessionDown` follows, at the latest when the lease ends."""

    def abort(self) -> None:
        """End it at once, without a BYE and without an event. Idempotent."""

    def statistics(self) -> Statistics: ...


class Relay(Protocol):
    """All sessions of one process. Leaving it aborts the remaining ones."""

    def open_session(
        self, control: socket.socket, *, peer: ProcId, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> Session:
        """Begin a session that has no connection yet; its lease runs from now on.

        Args:
            control: The local end of channel 0, a stream socket; the session owns it from now on.
            peer: The incarnation at the other end.
            is_dialler: Whether this side has dialled: its channels have odd numbers, those of the other side even ones.
            lease_seconds: Silence that ends the session, measured in ticks of the relay: time in which this machine was
                stopped does not count.
            session_id: Random number chosen by the dialling side; 0 on the other side, which gets it with the first
                connection.
        """
        ...


# ---- native ----------------------------------------------------------------------------------------------------------

# Sessions between hosts by the native library: its thread moves the bytes, Trio's thread decides and gets the events.
#
# The contract is the last part of `native/include/trimesh.h`.

_EVENTS_MAX: Final = 256
"""Events that are delivered before other tasks run."""

_ENDINGS: Final = {
    1: SessionEnding.LEASE,
    2: SessionEnding.BYE,
    3: SessionEnding.CLOSED,
    4: SessionEnding.PROTOCOL,
}


class NativeRelay:
    """All sessions of one process; see `Relay`. Made by `open_relay`."""

    def __init__(self, on_event: OnEvent) -> None:
        self.library: Library = load()
        out = self.library.ffi.new("tm_relay **")
        status.check(self.library.lib.tm_relay_create(out), "creating a relay", limit="BUSES_MAX")
        self.handle: Any = out[0]
        self._bell = int(self.library.lib.tm_relay_bell(self.handle))
        self._event = self.library.ffi.new("tm_relay_event *")
        self._on_event = on_event
        self._sessions: dict[int, NativeSession] = {}

    def open_session(
        self, control: socket.socket, *, peer: ProcId, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> NativeSession:
        """See `Relay.open_session`.

        Raises:
            LimitExceeded: HOST_SESSIONS_MAX sessions of the native library exist.
            OSError: The system refused memory.
            ValueError: `session_id` does not fit `is_dialler`.
        """
        if is_dialler != (session_id > 0):
            raise ValueError(f"session_id must be set by the dialling side only, got {session_id} with {is_dialler=}")
        out = self.library.ffi.new("uint32_t *")
        rc = self.library.lib.tm_relay_begin(
            self.handle, session_id, round(lease_seconds * 1000), control.fileno(), out
        )
        status.check(rc, "beginning a session with a host", limit="HOST_SESSIONS_MAX")
        control.detach()
        session = self._sessions[out[0]] = NativeSession(self, out[0], peer)
        return session

    def forget(self, handle: int) -> None:
        """Deliver no more events of a session."""
        self._sessions.pop(handle, None)

    async def serve(self) -> None:
        """Deliver events until cancelled, or until one of them makes its receiver close the relay."""
        while self.handle is not None:
            await trio.lowlevel.wait_readable(self._bell)
            for _ in range(_EVENTS_MAX):
                if self.handle is None or not self.library.lib.tm_relay_poll(self.handle, self._event):
                    break
                session = self._sessions.get(self._event.session)
                if session is not None:
                    self._tell(session)

    def _tell(self, session: NativeSession) -> None:
        lib, event = self.library.lib, self._event
        said = bytes(self.library.ffi.buffer(event.bytes, event.size))
        if event.kind == lib.TM_RELAY_OPENED:
            self._on_event(OpenedChannel(session, event.channel, said))
        elif event.kind == lib.TM_RELAY_ENDED:
            self._on_event(ChannelEnded(session, event.channel))
        elif event.kind == lib.TM_RELAY_DOWN:
            session.abort()
            self._on_event(SessionDown(session, _ENDINGS[event.number], said.decode(errors="replace")))
        elif event.number != session.connections:
            return  # an event of a connection that was replaced meanwhile
        elif event.kind == lib.TM_RELAY_RESUMED:
            self._on_event(SessionResumed(session))
        else:
            session.is_connected = False
            self._on_event(SessionInterrupted(session, said.decode(errors="replace")))

    def close(self) -> None:
        """Abort all sessions, and join the thread, which never waits."""
        for session in list(self._sessions.values()):
            session.abort()
        handle, self.handle = self.handle, None
        self.library.lib.tm_relay_destroy(handle)


@asynccontextmanager
async def open_relay(on_event: OnEvent) -> AsyncGenerator[NativeRelay, None]:
    """Serve sessions until the body ends, which aborts the remaining ones.

    Args:
        on_event: Called for each event; must not raise.

    Raises:
        NativeLibraryError: The native library cannot be loaded.
        OSError: The system refused a descriptor, memory or a thread.
    """
    relay = NativeRelay(on_event)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.serve)
            try:
                yield relay
            finally:
                nursery.cancel_scope.cancel(reason="the relay is closed")
    finally:
        relay.close()


class NativeSession:
    """One session; see `Session`.

    Attributes:
        peer: The incarnation at the other end.
        is_connected: Whether there is a connection, as far as is known.
        connections: Number of connections that it was given.
    """

    def __init__(self, relay: NativeRelay, handle: int, peer: ProcId) -> None:
        self.peer = peer
        self.is_connected = False
        self.connections = 0
        self._relay = relay
        self._handle = handle
        self._is_over = False
        self._last: Statistics  # set when it is over

    def __repr__(self) -> str:
        return f"<session with {self.peer:x}>"

    def attach(self, connection: HostConnection) -> None:
        sock, tls, wire, plain = connection
        if self._is_over:
            sock.close()
            tls.free()
            return
        ffi, lib = self._relay.library.ffi, self._relay.library.lib
        rc = lib.tm_relay_attach(
            self._relay.handle,
            self._handle,
            sock.fileno(),
            tls.handle,
            ffi.from_buffer("uint8_t[]", wire),
            len(wire),
            ffi.from_buffer("uint8_t[]", plain),
            len(plain),
        )
        status.check(rc, "attaching a connection to a host")
        sock.detach()
        tls.forget()
        self.connections += 1
        self.is_connected = True

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        if len(purpose) > limits.HOST_PURPOSE_BYTES_MAX:
            text = f"a purpose must have at most limits.HOST_PURPOSE_BYTES_MAX bytes, got {len(purpose)}"
            raise LimitExceeded("HOST_PURPOSE_BYTES_MAX", len(purpose), text)
        if self._is_over:
            sock.close()
            return 0
        ffi, lib = self._relay.library.ffi, self._relay.library.lib
        said, out = ffi.from_buffer("uint8_t[]", purpose), ffi.new("uint32_t *")
        rc = lib.tm_relay_open(self._relay.handle, self._handle, sock.fileno(), said, len(purpose), out)
        if rc == status.ERR_LIMIT:
            text = "a session must have at most limits.HOST_CHANNELS_MAX open channels, got one more"
            raise LimitExceeded("HOST_CHANNELS_MAX", limits.HOST_CHANNELS_MAX + 1, text)
        status.check(rc, "opening a channel to a host")
        sock.detach()
        return int(out[0])

    def accept_channel(self, channel: int, sock: socket.socket) -> None:
        if self._is_over:
            sock.close()
            return
        rc = self._relay.library.lib.tm_relay_answer(self._relay.handle, self._handle, channel, sock.fileno())
        status.check(rc, "accepting a channel of a host")
        sock.detach()

    def refuse_channel(self, channel: int) -> None:
        if not self._is_over:
            rc = self._relay.library.lib.tm_relay_answer(self._relay.handle, self._handle, channel, -1)
            status.check(rc, "refusing a channel of a host")

    def drop_connection(self) -> None:
        self._end("TM_RELAY_DROP")

    def close(self) -> None:
        self._end("TM_RELAY_CLOSE")

    def abort(self) -> None:
        if not self._is_over:
            self._last = self.statistics()
            self._end("TM_RELAY_ABORT")
            self._is_over = True
            self.is_connected = False
            self._relay.forget(self._handle)

    def _end(self, how: str) -> None:
        if not self._is_over:
            lib = self._relay.library.lib
            status.check(lib.tm_relay_end(self._relay.handle, self._handle, getattr(lib, how)), "ending a session")

    def statistics(self) -> Statistics:
        """See `Session.statistics`; a session that is over keeps its last ones."""
        if self._is_over:
            return self._last
        counts = self._relay.library.ffi.new("tm_relay_counts *")
        rc = self._relay.library.lib.tm_relay_get_counts(self._relay.handle, self._handle, counts)
        status.check(rc, "querying a session")
        return Statistics(*counts.counts)


# ---- sockets that a channel of a session carries: reads and writes of a whole size -----------------------------------


async def receive_exactly(sock: trio.socket.SocketType, size: int) -> bytes | None:
    """Return exactly `size` bytes, or None if the channel ends before."""
    found = bytearray()
    while len(found) < size:
        data = await sock.recv(size - len(found))
        if not data:
            return None
        found += data
    return bytes(found)


async def send_everything(sock: trio.socket.SocketType, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[await sock.send(rest) :]
