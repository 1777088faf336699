"""A client of the carrier tcp, written by hand from the description of the protocol: it says what a test wants."""

from __future__ import annotations

import socket
import struct
from typing import Any

import attrs

MAGIC = b"trimeshb"
VERSION = 1
BODY_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 512
WAIT_SECONDS = 60.0
"""A hang guard."""

_MASK = (1 << 64) - 1
_REQUEST = struct.Struct("<IIIIQQQQQ")
_ANSWER = struct.Struct("<QiIQQ")
_HELLO = struct.Struct("<8sIIQ")


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK


def _round(v: list[int]) -> None:
    v[0] = (v[0] + v[1]) & _MASK
    v[2] = (v[2] + v[3]) & _MASK
    v[1] = _rotated(v[1], 13) ^ v[0]
    v[3] = _rotated(v[3], 16) ^ v[2]
    v[0] = _rotated(v[0], 32)
    v[2] = (v[2] + v[1]) & _MASK
    v[0] = (v[0] + v[3]) & _MASK
    v[1] = _rotated(v[1], 17) ^ v[2]
    v[3] = _rotated(v[3], 21) ^ v[0]
    v[2] = _rotated(v[2], 32)


def siphash(key: bytes, data: bytes) -> bytes:
    """Return SipHash-2-4 with 128 bits of output."""
    k = struct.unpack("<2Q", key)
    v = [
        0x736F6D6570736575 ^ k[0],
        0x646F72616E646F6D ^ k[1] ^ 0xEE,
        0x6C7967656E657261 ^ k[0],
        0x7465646279746573 ^ k[1],
    ]
    whole = len(data) // 8 * 8
    words = [*struct.unpack(f"<{whole // 8}Q", data[:whole])]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    for word in words:
        v[3] ^= word
        _round(v)
        _round(v)
        v[0] ^= word
    halves = []
    for place, mark in ((2, 0xEE), (1, 0xDD)):
        v[place] ^= mark
        for _ in range(4):
            _round(v)
        halves.append(v[0] ^ v[1] ^ v[2] ^ v[3])
    return struct.pack("<2Q", *halves)


@attrs.frozen
class Answer:
    """What the owner said."""

    counter: int
    status: int
    size: int
    value: int


class Client:
    """One connection."""

    def __init__(self, home: list[Any], *, receive_bytes: int | None = None) -> None:
        self.epoch, port = home[0], home[5]
        self.sock = socket.socket()
        self.sock.settimeout(WAIT_SECONDS)
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.connect((socket.inet_ntoa(bytes.fromhex(home[7])[:4]), port))
        self.nonce = b""

    def close(self) -> None:
        """Go away."""
        self.sock.close()

    def greet(self, *, epoch: int | None = None) -> int:
        """Say hello; return the epoch of who answers."""
        self.send(_HELLO.pack(MAGIC, VERSION, 0, self.epoch if epoch is None else epoch))
        magic, version, zero, answered = _HELLO.unpack(self.receive(_HELLO.size))
        assert (magic, version, zero) == (MAGIC, VERSION, 0)
        self.nonce = self.receive(16)
        return int(answered)

    def request(
        self, kind: int, grant: dict[str, Any], *, counter: int = 0, offset: int = 0, size: int = 8, operand: int = 0
    ) -> bytes:
        """Return the bytes of a request."""
        place, generation = grant["place"], grant["generation"]
        said = _REQUEST.pack(kind, place, generation, 0, counter, offset, size, operand, 0)
        return said + siphash(bytes.fromhex(grant["secret"]), self.nonce + said)

    def answer(self) -> Answer:
        """Wait for an answer."""
        counter, status, zero, size, value = _ANSWER.unpack(self.receive(_ANSWER.size))
        assert zero == 0
        return Answer(counter, status, size, value)

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.sock.sendall(data)

    def receive(self, size: int) -> bytes:
        """Wait for so many bytes."""
        parts = []
        while size > 0:
            part = self.sock.recv(size)
            assert part, "the owner has closed the connection"
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if something else comes."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True
