"""A session between two hosts as the floors above see it; the native library implements it.

    relay = open_relay(on_event)                      # async with: owns all sessions
    session = relay.open_session(...)                 # before there is a connection
    session.attach(connection)                        # TLS is open; a new connection takes the place of an older one
    number = session.open_channel(sock, purpose)      # one end of a socket pair: what is written there goes across
    session.accept_channel(number, sock)              # answer to `OpenedChannel`; or refuse_channel(number)

Channel 0 exists from the start; its socket is given to `open_session`. Every other channel is opened by one side with a
*purpose*, bytes that mean something to the floors above. The end of a socket (EOF, reset) arrives at the other end.

Events come in Trio's thread, one after the other, never while a method of the relay runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from trimesh._native.tls import TLSSession
from trimesh.ids import ProcId


class SessionEnding(Enum):
    """Why a session is down."""

    LEASE = "lease"
    """Nothing has come for as long as the lease, with or without a connection."""

    BYE = "bye"
    """The peer has ended it in good order; what was sent before has come."""

    CLOSED = "closed"
    """This side has, and the peer has taken all that was sent before."""

    PROTOCOL = "protocol"
    """The peer broke the rules of the session; the reason says which."""


class HostConnection(NamedTuple):
    """A connection whose TLS session is open; all of it is taken over.

    Attributes:
        sock: Connected, non-blocking.
        tls: In state OPEN.
        wire: What has come from the socket and TLS has not taken yet.
        plain: What TLS has given out behind the hello.
    """

    sock: socket.socket
    tls: TLSSession
    wire: bytes = b""
    plain: bytes = b""


class OpenedChannel(NamedTuple):
    """The peer has opened a channel; to be accepted or refused, now or later. What comes meanwhile is kept."""

    session: Session
    channel: int
    purpose: bytes


class SessionResumed(NamedTuple):
    """The peer has taken up the session on a new connection; what it has not got is sent again."""

    session: Session


class SessionInterrupted(NamedTuple):
    """The connection broke, the session lives: the side that has dialled dials again, the other one waits."""

    session: Session
    reason: str


class SessionDown(NamedTuple):
    """The session is over; all its sockets have been closed. Comes once, nothing of the session comes after it."""

    session: Session
    ending: SessionEnding
    reason: str


class ChannelEnded(NamedTuple):
    """Both directions of a channel have ended, or it was reset; its socket has been closed. Not told of channel 0."""

    session: Session
    channel: int


SessionEvent = OpenedChannel | SessionResumed | SessionInterrupted | SessionDown | ChannelEnded
OnEvent = Callable[[SessionEvent], None]
"""Called for each event; must not raise."""


class Statistics(NamedTuple):
    """What a session has counted since it began.

    Attributes:
        frames_sent, frames_received: Numbered ones, each once.
        bytes_sent, bytes_received: Of channels.
        resent: Frames sent again after a connection broke.
        duplicates: Frames that came again, and were dropped.
        unacknowledged: Bytes kept to be sent again.
        channels: Open ones.
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
        """Whether there is a connection, as far as is known."""
        ...

    def attach(self, connection: HostConnection) -> None:
        """Use a new connection, at once, in place of one that there may be; never blocks. Closed if it is down."""

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        """Join a socket to a new channel; never blocks.

        Args:
            sock: A connected stream socket, taken over.
            purpose: At most `limits.HOST_PURPOSE_BYTES_MAX`; the peer gets it with `OpenedChannel`.

        Returns:
            The number of the channel. When the session is down, the socket is closed at once.

        Raises:
            LimitExceeded: `limits.HOST_CHANNELS_MAX` are open, or the purpose is too long; the socket is the caller's.
        """
        ...

    def accept_channel(self, channel: int, sock: socket.socket) -> None:
        """Join a socket, which is taken over, to a channel that the peer has opened. Closed if that has ended."""

    def refuse_channel(self, channel: int) -> None:
        """Reset a channel that the peer has opened. Nothing if it has ended."""

    def drop_connection(self) -> None:
        """Close the connection, as if it had broken; the session lives. For tests, and for a new address."""

    def close(self) -> None:
        """Say BYE behind everything that was taken in; `SessionDown` follows, at the latest when the lease ends."""

    def abort(self) -> None:
        """End it at once, without a word and without an event. Idempotent."""

    def statistics(self) -> Statistics: ...


class Relay(Protocol):
    """All sessions of one process. Leaving it aborts those that are left."""

    def open_session(
        self, control: socket.socket, *, peer: ProcId, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> Session:
        """Begin a session that has no connection yet; its lease runs from now on.

        Args:
            control: The local end of channel 0, a stream socket; taken over.
            peer: The incarnation at the other end.
            is_dialler: Whether this side has dialled: its channels have odd numbers, those of the other side even ones.
            lease_seconds: Silence that ends the session, measured in ticks of the relay: a machine that was stopped
                does not count the time in which it stood.
            session_id: Random, of who dials; the other side says 0, and learns it from the first connection.
        """
        ...
