"""The bytes of a link, written a second time from protocol/frame.zig: what a foreign or ill peer may send."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import attrs

from trimesh import limits
from trimesh._native.lib import ABI_VERSION

HELLO, MESSAGE, FRAGMENT, BYE, BEAT, CREDIT, RELEASE, RETIRE = 1, 2, 3, 4, 5, 6, 7, 8
CONTROL, DATA = 0, 1
MORE = 1
VERSION = 8
ABI = ABI_VERSION  # it says what both sides were built from, and nothing of the format
WORD = (1 << 64) - 1
PAGE = 4096


def check_of(words: Sequence[int]) -> int:
    """Return the check of the four words of a header, whose upper half of the last counts as 0."""
    mixed = 0x7472696D65736831
    for word in (*words[:3], words[3] & 0xFFFFFFFF):
        mixed = ((mixed ^ word) * 0x9E3779B97F4A7C15) & WORD
        mixed ^= mixed >> 32
    return mixed & 0xFFFFFFFF


def header(
    kind: int,
    *,
    length: int = 32,
    lane: int = CONTROL,
    flags: int = 0,
    epoch: int = 7,
    sequence: int = 0,
    head_size: int = 0,
    n_bodies: int = 0,
    version: int = VERSION,
) -> bytes:
    """Return the 32 bytes of a frame header."""
    raw = struct.pack("<IBBBBQQHHI", length, version, kind, lane, flags, epoch, sequence, head_size, n_bodies, 0)
    return raw[:28] + struct.pack("<I", check_of(struct.unpack("<4Q", raw)))


def padded(frame: bytes) -> bytes:
    """Return a frame with the padding that follows it."""
    return frame + bytes(-len(frame) % 8)


def hello(*, epoch: int = 7, slot: int = 0, pid: int = 0, ring_bytes: int = limits.RING_BYTES, abi: int = ABI) -> bytes:
    """Return a whole hello."""
    payload = struct.pack("<IIIIQII", abi, slot, pid or os.getpid(), ring_bytes, 0, 500, 3000)
    return header(HELLO, length=64, epoch=epoch) + payload


def message(head: bytes, *, sequence: int = 0, lane: int = DATA, epoch: int = 7) -> bytes:
    """Return a whole message without bodies."""
    frame = header(MESSAGE, length=32 + len(head), lane=lane, epoch=epoch, sequence=sequence, head_size=len(head))
    return padded(frame + head)


def message_with_bodies(
    head: bytes, sizes: Sequence[int], body: bytes, *, more: bool = False, sequence: int = 0, epoch: int = 7
) -> bytes:
    """Return the first frame of a message that announces bodies of `sizes` and holds `body`."""
    content = head + bytes(-len(head) % 8) + struct.pack(f"<{len(sizes)}Q", *sizes) + body
    return padded(
        header(
            MESSAGE,
            length=32 + len(content),
            lane=DATA,
            flags=MORE if more else 0,
            epoch=epoch,
            sequence=sequence,
            head_size=len(head),
            n_bodies=len(sizes),
        )
        + content
    )


def ref(place: int, generation: int) -> int:
    """Return the name of a segment."""
    return place | generation << 8


def in_segment(place: int, generation: int, size: int) -> int:
    """Return the word of a table of bodies that names a segment."""
    return 1 << 63 | ref(place, generation) << 40 | size


def about_segments(kind: int, refs: Sequence[int], *, epoch: int = 7) -> bytes:
    """Return a RELEASE or RETIRE."""
    return padded(header(kind, length=32 + 4 * len(refs), epoch=epoch) + struct.pack(f"<{len(refs)}I", *refs))


def bye(*, epoch: int = 7) -> bytes:
    return header(BYE, epoch=epoch)


def shared_memory(size: int, *, seals: int | None = None) -> int:
    """Return a memfd of `size` bytes, sealed as the library seals it unless `seals` says otherwise."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, size)
    if seals is None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@attrs.define(eq=False)
class RingPeer:
    """A peer on this host that is made of this file: it greets as it should and then writes what a test wants."""

    sock: socket.socket
    epoch: int = 7
    ring_fd: int = attrs.field(factory=lambda: shared_memory(PAGE + limits.RING_BYTES))
    page_fd: int = attrs.field(factory=lambda: shared_memory(PAGE))
    bell_fd: int = attrs.field(factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    head: int = 0
    _maps: list[mmap.mmap] = attrs.field(factory=list)
    _peer_fds: list[int] = attrs.field(factory=list)
    _slot: int = 0

    def greet(self) -> None:
        """Say hello, and take the rings of the other side, which must have said hello."""
        socket.send_fds(self.sock, [hello(epoch=self.epoch)], [self.ring_fd, self.page_fd, self.bell_fd])
        data, self._peer_fds, _, _ = socket.recv_fds(self.sock, 64, 3)
        assert len(data) == 64
        self._slot = struct.unpack_from("<I", data, 36)[0]
        self._maps = [
            mmap.mmap(fd, size) for fd, size in zip(self._peer_fds, (PAGE + limits.RING_BYTES, PAGE), strict=False)
        ]

    def write(self, data: bytes, *, move: int | None = None) -> None:
        """Put bytes where the next frame goes, move the head by their size (or `move`), and wake the other side."""
        ring, _ = self._maps
        for i, byte in enumerate(data):
            ring[PAGE + (self.head + i) % limits.RING_BYTES] = byte
        self.head = (self.head + (len(data) if move is None else move)) & WORD
        struct.pack_into("<Q", ring, 0, self.head)
        self.ring()

    def ring(self) -> None:
        """Make the other side look."""
        _, page = self._maps
        word = 64 + 8 * (self._slot // 64)
        bits = struct.unpack_from("<Q", page, word)[0] | 1 << (self._slot % 64)
        struct.pack_into("<Q", page, word, bits)
        os.eventfd_write(self._peer_fds[2], 1)

    def set_tail(self, tail: int) -> None:
        """Claim to have read up to `tail` of this peer's own inbound ring."""
        with mmap.mmap(self.ring_fd, PAGE + limits.RING_BYTES) as ring:
            struct.pack_into("<Q", ring, 128, tail)

    def close(self) -> None:
        for one in self._maps:
            one.close()
        for fd in (*self._peer_fds, self.ring_fd, self.page_fd, self.bell_fd):
            os.close(fd)
        self.sock.close()
