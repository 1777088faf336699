"""Frames of a session between two hosts, inside TLS; PURE.

    0 u32 payload length   4 u8 kind   5 u8 0   6 u16 0   8 u32 channel   12 u32 0   16 u64 number   24 u64 ack

Little endian, 32 bytes, then the payload. `ack` is the number that its sender expects next. The payload of MANY, which
stands for a DATA of each of several channels, is for each of them: u32 channel, u32 bytes, the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from trimesh import limits
from trimesh.errors import ProtocolError

_HEADER: Final = struct.Struct("<IBBHIIQQ")
_RESUME: Final = struct.Struct("<QQQ")
_WINDOW: Final = struct.Struct("<Q")
_PIECE: Final = struct.Struct("<II")
PIECE_BYTES: Final = _PIECE.size
"""What stands before the bytes of a channel in MANY."""

_NEW: Final = 1

assert _HEADER.size == limits.HOST_FRAME_HEADER_BYTES


class FrameKind(IntEnum):
    """What a frame says. RESUME and BEAT have no number of their own."""

    RESUME = 1
    OPEN = 2
    DATA = 3
    WINDOW = 4
    CLOSE = 5
    RESET = 6
    BEAT = 7
    BYE = 8
    MANY = 9


UNNUMBERED: Final = frozenset({FrameKind.RESUME, FrameKind.BEAT})
_OF_THE_SESSION: Final = frozenset({FrameKind.RESUME, FrameKind.BEAT, FrameKind.BYE, FrameKind.MANY})
_SIZES: Final = {FrameKind.RESUME: _RESUME.size, FrameKind.WINDOW: _WINDOW.size}
_EMPTY: Final = frozenset({FrameKind.CLOSE, FrameKind.RESET, FrameKind.BEAT, FrameKind.BYE})


class Frame(NamedTuple):
    """One frame."""

    kind: FrameKind
    channel: int
    number: int
    ack: int
    payload: bytes


class Resume(NamedTuple):
    """Payload of RESUME, the first frame of each connection.

    Attributes:
        session: Number of the session, drawn by who dials.
        expected: Number of the frame that its sender expects next.
        is_new: Whether its sender has got nothing yet.
    """

    session: int
    expected: int
    is_new: bool

    def encode(self) -> bytes:
        """Return the payload."""
        return _RESUME.pack(self.session, self.expected, _NEW if self.is_new else 0)

    @staticmethod
    def decode(payload: bytes) -> Resume:
        """Read a payload of the right size.

        Raises:
            ProtocolError: It has unknown flags.
        """
        session, expected, flags = _RESUME.unpack(payload)
        if flags & ~_NEW:
            raise ProtocolError(f"a RESUME has the flag 1 or none, got {flags}")
        return Resume(session, expected, bool(flags))


def encode_window(granted: int) -> bytes:
    """Return the payload of WINDOW: bytes of the channel that were granted since it began."""
    return _WINDOW.pack(granted)


def decode_window(payload: bytes) -> int:
    """Read the payload of WINDOW."""
    return int(_WINDOW.unpack(payload)[0])


def encode_many(pieces: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the payload of MANY: channels and their bytes."""
    return b"".join(_PIECE.pack(channel, len(data)) + data for channel, data in pieces)


def decode_many(payload: bytes) -> list[tuple[int, bytes]]:
    """Read the payload of MANY.

    Raises:
        ProtocolError: It is none.
    """
    pieces = list[tuple[int, bytes]]()
    at = 0
    while len(payload) - at >= _PIECE.size:
        channel, size = _PIECE.unpack_from(payload, at)
        at += _PIECE.size
        if not 0 < size <= len(payload) - at:
            raise ProtocolError(f"MANY has bytes of each of its channels, got {size} of {len(payload) - at}")
        pieces.append((channel, payload[at : at + size]))
        at += size
    if at != len(payload) or len(pieces) < 2:
        raise ProtocolError(f"MANY has two channels or more, and nothing behind them, got {len(pieces)}")
    return pieces


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    kind, channel, number, ack, payload = frame
    return _HEADER.pack(len(payload), kind, 0, 0, channel, 0, number, ack) + payload


class FrameReader:
    """Cuts the bytes of one connection into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._data += data

    def take(self) -> Frame | None:
        """Return the next frame, None when more must come first.

        Raises:
            ProtocolError: It is none.
        """
        if len(self._data) < _HEADER.size:
            return None
        length, number_of_kind, zero, zeros, channel, more_zeros, number, ack = _HEADER.unpack_from(self._data)
        try:
            kind = FrameKind(number_of_kind)
        except ValueError:
            raise ProtocolError(
                f"a frame between hosts is of kind 1 to {max(FrameKind)}, got {number_of_kind}"
            ) from None
        if zero or zeros or more_zeros:
            raise ProtocolError(f"a frame between hosts has zeros at 5, 6 and 12, got {zero}, {zeros}, {more_zeros}")
        _check(kind, channel, length)
        if len(self._data) < _HEADER.size + length:
            return None
        payload = bytes(self._data[_HEADER.size : _HEADER.size + length])
        del self._data[: _HEADER.size + length]
        return Frame(kind, channel, number, ack, payload)


def _check(kind: FrameKind, channel: int, length: int) -> None:
    if kind in _OF_THE_SESSION and channel:
        raise ProtocolError(f"{kind.name} is of the session, got it for channel {channel}")
    wanted = 0 if kind in _EMPTY else _SIZES.get(kind)
    if wanted is not None and length != wanted:
        raise ProtocolError(f"{kind.name} has {wanted} bytes, got {length}")
    most = limits.HOST_PURPOSE_BYTES_MAX if kind is FrameKind.OPEN else limits.HOST_FRAME_PAYLOAD_BYTES_MAX
    if length > most:
        raise ProtocolError(f"{kind.name} has at most {most} bytes, got {length}")
    if kind is FrameKind.DATA and length == 0:
        raise ProtocolError("DATA has bytes, got none")
    if kind in (FrameKind.OPEN, FrameKind.CLOSE, FrameKind.RESET) and channel == 0:
        raise ProtocolError(f"channel 0 is open as long as the session, got {kind.name} for it")
