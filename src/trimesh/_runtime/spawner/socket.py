"""A broker socket: whole records with descriptors over a SOCK_SEQPACKET pair, never blocking.

Both ends use it: the spawner under its poll loop, the client under Trio. A record that does not fit one packet
travels in a memfd; reading it copies, so a sender that shrinks the memfd afterwards cannot fault the reader.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh.errors import LimitExceeded, ProtocolError

_FDS_MAX = 8
_INT_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FDS_MAX * _INT_BYTES)


def broker_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new broker socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class FarSocket(socket.socket):
    """A stream socket to a process of another host; agents carry its bytes, but no descriptors."""


def stream_of(fd: int, *, is_far: bool) -> socket.socket:
    """Return a socket for a descriptor, which it owns."""
    return FarSocket(fileno=fd) if is_far else socket.socket(fileno=fd)


class Received(msgspec.Struct, frozen=True):
    """One record with its descriptors, which the receiver now owns.

    Attributes:
        fds: Its descriptors, in order; they close on exec.
        truncated: Some descriptors were lost because this process has no room for more.
    """

    record: wire.AnyRecord
    fds: tuple[int, ...]
    truncated: bool


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class BrokerSocket:
    """One end of a broker socket, with a queue for records that the other end has no room for.

    Args:
        sock: The socket; owned by this object from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self.socket = sock
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self.socket.fileno()

    @property
    def queued(self) -> int:
        """Records that wait for room."""
        return len(self._queue)

    def put(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Queue a record behind those that wait; `flush` sends. Owns `fds` from now on, whatever happens.

        Raises:
            LimitExceeded: The record is larger than `limits.BROKER_RECORD_BYTES_MAX`.
            OSError: There is no descriptor or memory for a large record.
        """
        try:
            packet = _pack(record, tuple(fds))
        except BaseException:
            close_all(fds)
            raise
        self._queue.append(packet)

    def send(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Send now, or as soon as `flush` finds room. Owns `fds` from now on, whatever happens.

        Raises:
            LimitExceeded: See `put`.
            OSError: See `put` and `flush`.
        """
        self.put(record, fds)
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> bool:
        """Send queued records while there is room.

        Returns:
            True when the queue is empty.

        Raises:
            OSError: The other end is gone, or descriptors could not be passed (that record is dropped).
        """
        while self._queue:
            data, fds = self._queue[0]
            try:
                self.socket.sendmsg([data], _rights(fds), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._queue.popleft()
                close_all(fds)
                raise
            self._queue.popleft()
            close_all(fds)
        return True

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end. Trio."""
        await trio.lowlevel.wait_readable(self.socket)

    async def wait_writable(self) -> None:
        """Wait until there may be room. Trio."""
        await trio.lowlevel.wait_writable(self.socket)

    def receive(self) -> Received | None:
        """Return the next record, or None when there is none yet.

        Raises:
            EOFError: The other end is closed.
            ProtocolError: The packet is not a record; its descriptors are closed.
            OSError: The socket broke.
        """
        try:
            data, ancillary, flags, _ = self._receive_packet()
        except (BlockingIOError, InterruptedError):
            return None
        fds = _descriptors(ancillary)
        try:
            if not data:
                raise EOFError
            if flags & socket.MSG_TRUNC:
                raise ProtocolError(f"a packet must have at most {limits.BROKER_PACKET_BYTES_MAX} bytes, got more")
            truncated = bool(flags & socket.MSG_CTRUNC)
            record = wire.decode(data)
            if isinstance(record, wire.Detached):
                if not fds:
                    raise OSError(errno.EMFILE, "no descriptor was left to receive a large record")
                record, fds = _read_detached(record, fds[0]), _drop_first(fds)
        except BaseException:
            close_all(fds)
            raise
        return Received(record, tuple(fds), truncated)

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        size, flags = limits.BROKER_PACKET_BYTES_MAX, socket.MSG_CMSG_CLOEXEC
        try:
            return self.socket.recvmsg(size, _ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            # The other end closed without reading all packets. The error comes once, before the data that it sent.
            return self.socket.recvmsg(size, _ANCILLARY_BYTES, flags)

    def forget(self) -> None:
        """Release the socket without closing its descriptor; for a forked child, which closes by number."""
        if self.socket.fileno() != -1:
            self.socket.detach()

    def close(self) -> None:
        """Close the socket and the descriptors that were never sent."""
        self.socket.close()
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()


def _pack(record: wire.AnyRecord, fds: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    assert len(fds) < _FDS_MAX
    data = wire.encode(record)
    if len(data) <= limits.BROKER_PACKET_BYTES_MAX:
        return data, fds
    if len(data) > limits.BROKER_RECORD_BYTES_MAX:
        raise LimitExceeded("BROKER_RECORD_BYTES_MAX", len(data))
    memfd = memfd_of(data)
    return wire.encode(wire.Detached(len(data))), (memfd, *fds)


def memfd_of(data: bytes) -> int:
    """Return a memfd that holds `data`, positioned at its start."""
    memfd = os.memfd_create("trimesh-record")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memfd, view) :]
        os.lseek(memfd, 0, os.SEEK_SET)
    except BaseException:
        os.close(memfd)
        raise
    return memfd


def _read_detached(header: wire.Detached, memfd: int) -> wire.AnyRecord:
    if header.size > limits.BROKER_RECORD_BYTES_MAX:
        raise ProtocolError(f"a record must have at most {limits.BROKER_RECORD_BYTES_MAX} bytes, got {header.size}")
    record = wire.decode(read_exactly(memfd, header.size))
    if isinstance(record, wire.Detached):
        raise ProtocolError("a memfd must not hold another Detached record")
    return record


def read_exactly(fd: int, size: int) -> bytes:
    """Return `size` bytes from the start of a file.

    Raises:
        ProtocolError: The file is shorter, or cannot be read.
    """
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.pread(fd, size - len(data), len(data))
        except OSError as error:
            raise ProtocolError(f"a detached record must be in a readable memfd: {error}") from None
        if not piece:
            raise ProtocolError(f"a detached record must have the announced {size} bytes, got {len(data)}")
        data += piece
    return bytes(data)


def _drop_first(fds: list[int]) -> list[int]:
    os.close(fds[0])
    return fds[1:]


def _rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(fds)
