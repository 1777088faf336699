"""One side of a session between two hosts, as a state machine: the measure of `native/src/relay/machine.zig`.

PURE: bytes and seconds in, bytes and news out.

Invariants
    HO-1  Frames that have a number are taken by the peer once, in order, whatever becomes of connections: they are kept
          until they are acknowledged, and sent again behind the RESUME of a new connection.
    HO-2  What is kept is bounded: data by `limits.HOST_RESEND_BYTES`, and windows and ends of channels, which pass
          beyond, by the number of channels.
    HO-3  Of one channel at most `limits.HOST_WINDOW_BYTES` are under way, or not yet taken by its reader.
    HO-4  What this side says of itself goes first, then channel 0, then the others in turn, a quantum each.
    HO-5  Silence is counted in the seconds of `tick`, with and without a connection.
    HO-6  Bytes of the peer raise `ProtocolError`, nothing else.
    HO-7  Small pieces of channels whose turns follow each other go in one frame, which is no difference for channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.relay.oracle.frames import (
    PIECE_BYTES,
    UNNUMBERED,
    Frame,
    FrameKind,
    FrameReader,
    Resume,
    decode_many,
    decode_window,
    encode,
    encode_many,
    encode_window,
)

from trimesh import limits
from trimesh._transport.relay import SessionEnding
from trimesh.errors import LimitExceeded, ProtocolError

CONTROL: Final = 0
"""The channel that exists from the start."""


class ChannelOpened(NamedTuple):
    """The peer has opened a channel."""

    channel: int
    purpose: bytes


class ChannelData(NamedTuple):
    """Bytes have come; `consumed` is told when the reader has taken them."""

    channel: int
    data: bytes


class ChannelClosed(NamedTuple):
    """The peer sends no more on a channel."""

    channel: int


class ChannelReset(NamedTuple):
    """A channel is gone, both ways."""

    channel: int


class Resumed(NamedTuple):
    """The peer has said what it expects: frames go again."""


class Bye(NamedTuple):
    """The peer has ended the session; its acknowledgement is in what `take` returns next."""


class ManyData(NamedTuple):
    """Bytes of several channels have come in one frame."""

    pieces: list[ChannelData]


Told = ChannelOpened | ChannelData | ChannelClosed | ChannelReset | Resumed | Bye
News = Told | ManyData


class SessionChannel:
    """Both directions of one channel.

    Attributes:
        queue, queued: What was given and is not sent, and its bytes.
        granted, sent: By the peer, and to it, in bytes since it began.
        received, consumed, allowed: From the peer; taken by the reader; granted to the peer.
        is_finished, has_closed: No more is given; CLOSE was sent.
        peer_closed: CLOSE has come.
    """

    __slots__ = (
        "allowed", "consumed", "granted", "has_closed", "is_finished", "peer_closed", "queue", "queued", "received",
        "sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue = deque[bytes]()
        self.queued = 0
        self.granted = self.allowed = limits.HOST_WINDOW_BYTES
        self.sent = self.received = self.consumed = 0
        self.is_finished = self.has_closed = self.peer_closed = False

    @property
    def wants_to_send(self) -> bool:
        """Whether it is to have its turn."""
        if self.queue:
            return self.sent < self.granted
        return self.is_finished and not self.has_closed


class HostSession:
    """One side of a session.

    Args:
        is_dialler: Whether this side dials.
        lease_seconds: Silence that ends it.
        session_id: Of who dials; 0 on the other side, until it is told.

    Attributes:
        is_connected: Whether there is a connection.
        is_resumed: Whether the peer has said on it what it expects.
        is_saying_bye: Whether the session is being closed here.
        frames_sent, frames_received, bytes_sent, bytes_received, resent, duplicates: See `Statistics`.
    """

    def __init__(self, *, is_dialler: bool, lease_seconds: float, session_id: int = 0) -> None:
        if is_dialler != (session_id > 0):
            raise ValueError(f"session_id must be set by the dialling side only, got {session_id} with {is_dialler=}")
        self.is_connected = self.is_resumed = self.is_saying_bye = False
        self.frames_sent = self.frames_received = self.bytes_sent = self.bytes_received = 0
        self.resent = self.duplicates = 0
        self._session_id = session_id
        self._lease = lease_seconds
        self._parity = 1 if is_dialler else 0
        self._next_own = 1 if is_dialler else 2
        self._next_theirs = 2 if is_dialler else 1
        self._channels: dict[int, SessionChannel] = {CONTROL: SessionChannel()}
        self._turns = deque[int]()
        self._own = deque[tuple[FrameKind, int, bytes]]()
        self._windows: dict[int, None] = {}
        self._reader = FrameReader()
        self._number = 0
        self._expected = 0
        self._kept = deque[tuple[int, FrameKind, int, bytes]]()
        self._kept_bytes = 0
        self._again = 0
        self._owes_resume = self._owes_beat = False
        self._has_said_bye = False
        self._silence = self._since_sent = 0.0
        self._bytes_unacknowledged = self._frames_unacknowledged = 0

    # ---- connections -----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Begin with a new connection."""
        self.is_connected, self.is_resumed = True, False
        self._reader = FrameReader()
        self._owes_resume, self._owes_beat = True, False
        self._since_sent = 0.0

    def disconnect(self) -> None:
        """Learn that the connection has ended."""
        self.is_connected = self.is_resumed = False

    def tick(self, seconds: float) -> SessionEnding | None:
        """Let time pass; return why the session is over, None while it is not."""
        self._silence += seconds
        self._since_sent += seconds
        if self._since_sent >= limits.HOST_BEAT_SECONDS:
            self._owes_beat = True
        if self._has_said_bye and (self.is_parted or not self.is_connected):
            return SessionEnding.CLOSED
        return SessionEnding.LEASE if self._silence >= self._lease else None

    @property
    def is_parted(self) -> bool:
        """Whether the peer has got everything, BYE included."""
        return self._has_said_bye and not self._kept

    # ---- channels --------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """How many are open, channel 0 apart."""
        return len(self._channels) - 1

    @property
    def unacknowledged(self) -> int:
        """Bytes that are kept."""
        return self._kept_bytes

    def open(self, purpose: bytes) -> int:
        """Open a channel and return its number.

        Raises:
            LimitExceeded: There are too many, or the purpose is too long.
        """
        if len(purpose) > limits.HOST_PURPOSE_BYTES_MAX:
            text = f"a purpose must have at most limits.HOST_PURPOSE_BYTES_MAX bytes, got {len(purpose)}"
            raise LimitExceeded("HOST_PURPOSE_BYTES_MAX", len(purpose), text)
        if self.channels >= limits.HOST_CHANNELS_MAX:
            text = "a session must have at most limits.HOST_CHANNELS_MAX open channels, got one more"
            raise LimitExceeded("HOST_CHANNELS_MAX", limits.HOST_CHANNELS_MAX + 1, text)
        number = self._next_own
        self._next_own += 2
        self._channels[number] = SessionChannel()
        self._own.append((FrameKind.OPEN, number, purpose))
        return number

    def is_open(self, channel: int) -> bool:
        """Return whether a channel has not ended."""
        return channel in self._channels

    def room(self, channel: int) -> int:
        """Return how many bytes may be given to a channel now; 0 if it has ended."""
        found = self._channels.get(channel)
        if found is None or found.is_finished or self.is_saying_bye:
            return 0
        left = min(found.granted - found.sent, 2 * limits.HOST_QUANTUM_BYTES) - found.queued
        return max(left, 0)

    def give(self, channel: int, data: bytes) -> None:
        """Hand over bytes to be sent, no more than there is room for."""
        found = self._channels[channel]
        assert data
        assert len(data) <= self.room(channel)
        found.queue.append(data)
        found.queued += len(data)
        self._take_turn(channel, found)

    def finish(self, channel: int) -> None:
        """Send no more on a channel, behind what was given."""
        found = self._channels.get(channel)
        if found is not None and channel != CONTROL:
            found.is_finished = True
            self._take_turn(channel, found)

    def reset(self, channel: int) -> None:
        """End a channel at once, both ways."""
        if channel != CONTROL and self._channels.pop(channel, None) is not None:
            self._own.append((FrameKind.RESET, channel, b""))

    def consumed(self, channel: int, size: int) -> None:
        """Learn that the reader of a channel has taken bytes: as many may follow."""
        found = self._channels.get(channel)
        if found is None:
            return
        found.consumed += size
        if found.allowed - found.consumed <= limits.HOST_WINDOW_BYTES // 2 and not found.peer_closed:
            self._windows[channel] = None

    def bye(self) -> None:
        """End the session behind all that was given."""
        self.is_saying_bye = True

    def _take_turn(self, number: int, channel: SessionChannel) -> None:
        if number != CONTROL and channel.wants_to_send and number not in self._turns:
            self._turns.append(number)

    # ---- what is sent ----------------------------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        """Return the next bytes for the connection: whole frames, of about `size` bytes together; b"" for nothing."""
        if not self.is_connected:
            return b""
        out = bytearray()
        for frame in self._next_frames():
            out += encode(frame)
            self._since_sent = 0.0
            self._bytes_unacknowledged = self._frames_unacknowledged = 0
            if len(out) >= size:
                break
        return bytes(out)

    def _next_frames(self) -> Iterator[Frame]:
        if self._owes_resume and self._session_id:  # who was dialled is told the number first
            self._owes_resume = False
            is_new = self._expected == 0 and self._number == 0
            resume = Resume(self._session_id, self._expected, is_new)
            yield Frame(FrameKind.RESUME, 0, 0, self._expected, resume.encode())
        if not self.is_resumed:
            return
        while self._again < len(self._kept):
            number, kind, channel, payload = self._kept[self._again]
            self._again += 1
            self.resent += 1
            yield Frame(kind, channel, number, self._expected, payload)
        while True:
            frame = self._own_frame() or self._data_frame()
            if frame is None:
                return
            yield frame

    def _own_frame(self) -> Frame | None:
        most = limits.HOST_RESEND_BYTES + limits.HOST_RESEND_RESERVE_BYTES
        if self._kept_bytes < most:
            if self._own:
                return self._numbered(*self._own.popleft())
            while self._windows:
                number = next(iter(self._windows))
                del self._windows[number]
                found = self._channels.get(number)
                if found is not None:
                    found.allowed = found.consumed + limits.HOST_WINDOW_BYTES
                    return self._numbered(FrameKind.WINDOW, number, encode_window(found.allowed))
        is_due = self._frames_unacknowledged >= limits.HOST_ACK_FRAMES
        if self._owes_beat or is_due or self._bytes_unacknowledged >= limits.HOST_ACK_BYTES:
            self._owes_beat = False
            return Frame(FrameKind.BEAT, 0, 0, self._expected, b"")
        return None

    def _data_frame(self) -> Frame | None:
        if self._kept_bytes >= limits.HOST_RESEND_BYTES:
            return None
        control = self._channels[CONTROL]
        if control.wants_to_send:
            return self._data_of(CONTROL, control)
        many = self._many_of()
        if many is not None:
            return many
        while self._turns:
            number = self._turns.popleft()
            found = self._channels.get(number)
            if found is None or not found.wants_to_send:
                continue
            frame = self._data_of(number, found) if found.queue else self._close_of(number, found)
            self._take_turn(number, found)
            return frame
        if self.is_saying_bye and not self._has_said_bye and not control.queue:
            self._has_said_bye = True
            return self._numbered(FrameKind.BYE, 0, b"")
        return None

    def _data_of(self, number: int, channel: SessionChannel) -> Frame:
        most = min(limits.HOST_QUANTUM_BYTES, channel.granted - channel.sent)
        data = channel.queue.popleft()
        if len(data) > most:
            channel.queue.appendleft(data[most:])
            data = data[:most]
        channel.queued -= len(data)
        channel.sent += len(data)
        self.bytes_sent += len(data)
        return self._numbered(FrameKind.DATA, number, data)

    def _many_of(self) -> Frame | None:
        """Return one frame with the small pieces of the channels whose turn is next, unless there is but one (HO-7)."""
        pieces = list[tuple[int, bytes]]()
        size = 0
        for number in self._turns:
            found = self._channels.get(number)
            if found is None or not found.queue:
                break
            data = found.queue[0]
            size += PIECE_BYTES + len(data)
            most = min(limits.HOST_FOLD_BYTES, found.granted - found.sent)
            if len(data) > most or size > limits.HOST_QUANTUM_BYTES:
                break
            pieces.append((number, data))
        if len(pieces) < 2:
            return None
        for number, data in pieces:
            found = self._channels[number]
            self._turns.remove(number)
            found.queue.popleft()
            found.queued -= len(data)
            found.sent += len(data)
            self.bytes_sent += len(data)
            self._take_turn(number, found)
        return self._numbered(FrameKind.MANY, 0, encode_many(pieces))

    def _close_of(self, number: int, channel: SessionChannel) -> Frame:
        channel.has_closed = True
        if channel.peer_closed:
            del self._channels[number]
        return self._numbered(FrameKind.CLOSE, number, b"")

    def _numbered(self, kind: FrameKind, channel: int, payload: bytes) -> Frame:
        number = self._number
        self._number += 1
        self.frames_sent += 1
        self._kept.append((number, kind, channel, payload))
        self._kept_bytes += limits.HOST_FRAME_HEADER_BYTES + len(payload)
        self._again = len(self._kept)
        return Frame(kind, channel, number, self._expected, payload)

    # ---- what has come ---------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> Iterator[Told]:
        """Take bytes of the connection and return, as they are asked for, what they say.

        Raises:
            ProtocolError: They break the rules; the session is over.
        """
        self._reader.feed(data)
        while (frame := self._reader.take()) is not None:
            self._silence = 0.0
            news = self._frame(frame)
            if isinstance(news, ManyData):
                yield from news.pieces
            elif news is not None:
                yield news

    def _frame(self, frame: Frame) -> News | None:
        if self.is_resumed == (frame.kind is FrameKind.RESUME):
            raise ProtocolError(f"a connection begins with one RESUME, got {frame.kind.name}")
        if frame.kind is FrameKind.RESUME:
            return self._resume(Resume.decode(frame.payload), frame.ack)
        self._acknowledge(frame.ack)
        if frame.kind in UNNUMBERED:
            return None
        if frame.number > self._expected:
            raise ProtocolError(f"frames come in order, got number {frame.number} for {self._expected}")
        if frame.number < self._expected:
            self.duplicates += 1
            return None
        self._expected += 1
        self.frames_received += 1
        self._frames_unacknowledged += 1
        self._bytes_unacknowledged += len(frame.payload)
        return self._new_frame(frame)

    def _resume(self, resume: Resume, ack: int) -> News:
        if self._session_id == 0 and resume.is_new and resume.session > 0:
            self._session_id = resume.session
        if resume.session != self._session_id:
            raise ProtocolError(f"a connection resumes its session, got number {resume.session:x} for another one")
        if resume.is_new and self._expected > 0:
            raise ProtocolError("a session begins once, got a peer that has forgotten what it sent")
        if resume.expected != ack:
            raise ProtocolError(f"a RESUME expects what it acknowledges, got {resume.expected} and {ack}")
        self._acknowledge(ack)
        self.is_resumed = True
        self._again = 0
        return Resumed()

    def _acknowledge(self, ack: int) -> None:
        oldest = self._number - len(self._kept)
        if not oldest <= ack <= self._number:
            raise ProtocolError(f"an acknowledgement is from {oldest} to {self._number}, got {ack}")
        for _ in range(ack - oldest):
            payload = self._kept.popleft()[3]
            self._kept_bytes -= limits.HOST_FRAME_HEADER_BYTES + len(payload)
            self._again = max(self._again - 1, 0)

    def _new_frame(self, frame: Frame) -> News | None:
        kind, number = frame.kind, frame.channel
        if kind is FrameKind.BYE:
            self._owes_beat = True
            return Bye()
        if kind is FrameKind.OPEN:
            return self._opened(number, frame.payload)
        if kind is FrameKind.MANY:
            return self._many(frame.payload)
        found = self._channels.get(number)
        if found is None:
            self._check_known(number, kind)
            return None
        if kind is FrameKind.DATA:
            return self._data(number, found, frame.payload)
        if kind is FrameKind.WINDOW:
            self._window(number, found, decode_window(frame.payload))
            return None
        if kind is FrameKind.RESET:
            del self._channels[number]
            return ChannelReset(number)
        if found.peer_closed:
            raise ProtocolError(f"a channel is closed once, got CLOSE again for {number}")
        found.peer_closed = True
        if found.has_closed:
            del self._channels[number]
        return ChannelClosed(number)

    def _opened(self, number: int, purpose: bytes) -> News:
        if number % 2 == self._parity or number < self._next_theirs:
            raise ProtocolError(f"a channel is opened by a number of its side that grows, got {number}")
        if self.channels >= 2 * limits.HOST_CHANNELS_MAX:
            raise ProtocolError(f"each side opens at most {limits.HOST_CHANNELS_MAX} channels, got one more")
        self._next_theirs = number + 2
        self._channels[number] = SessionChannel()
        return ChannelOpened(number, purpose)

    def _check_known(self, number: int, kind: FrameKind) -> None:
        """A frame may cross the end of its channel, but not come before its begin."""
        following = self._next_own if number % 2 == self._parity else self._next_theirs
        if number >= following:
            raise ProtocolError(f"a channel is opened first, got {kind.name} for {number}")

    def _data(self, number: int, channel: SessionChannel, data: bytes) -> ChannelData:
        channel.received += len(data)
        if channel.peer_closed or channel.received > channel.allowed:
            state = "closed" if channel.peer_closed else "full"
            raise ProtocolError(f"channel {number} is {state}, got {len(data)} bytes more for it")
        self.bytes_received += len(data)
        return ChannelData(number, data)

    def _many(self, payload: bytes) -> ManyData:
        pieces = list[ChannelData]()
        for number, data in decode_many(payload):
            found = self._channels.get(number)
            if found is None:
                self._check_known(number, FrameKind.DATA)
            else:
                pieces.append(self._data(number, found, data))
        return ManyData(pieces)

    def _window(self, number: int, channel: SessionChannel, granted: int) -> None:
        if granted < channel.granted:
            raise ProtocolError(f"a window grows, got {granted} after {channel.granted} for channel {number}")
        channel.granted = granted
        self._take_turn(number, channel)
