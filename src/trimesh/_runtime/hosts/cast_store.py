"""Bodies of casts in the agent of a host: each enters once, into memory that the processes of the host map.

    channel of casts --> CastStore: sealed memory without a name --> mapped by processes, by this process's descriptor

HK-1 What is kept is bounded, whatever the controller says. HK-2 Memory that was let go stays for as long as a process
has mapped it, and is given back with the last view of it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket

import trio

from trimesh import limits
from trimesh._runtime.hosts.cast_frames import ANSWER, NOWHERE, REQUEST, CastRequest, read_request, receive_exactly
from trimesh._transport.messages.host_memory import SEALS, WHERE, memory_name
from trimesh.errors import ProtocolError


class CastStore:
    """What the agent keeps for one controller. Closed by its owner.

    Attributes:
        kept: Bytes.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._casts: dict[int, tuple[int, int]] = {}  # descriptor (-1: it could not be kept) and size

    def open(self, number: int, size: int) -> KeptCast:
        """Begin to keep bytes.

        Raises:
            ProtocolError: The number was used, or there is no room.
        """
        if number in self._casts:
            raise ProtocolError(f"a cast has a number of its own, got {number} again")
        if len(self._casts) == limits.HOST_CASTS_MAX or self.kept + size > limits.HOST_CAST_BYTES:
            raise ProtocolError(f"an agent keeps {limits.HOST_CAST_BYTES} bytes of casts, got {size} more")
        one = KeptCast(size)
        self._casts[number] = one.fd, size
        self.kept += size
        return one

    def let_go(self, number: int) -> None:
        """Keep them no more.

        Raises:
            ProtocolError: They are not kept.
        """
        found = self._casts.pop(number, None)
        if found is None:
            raise ProtocolError(f"what is let go was kept, got cast {number}")
        fd, size = found
        self.kept -= size
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Keep nothing more."""
        for number in list(self._casts):
            self.let_go(number)


class KeptCast:
    """Memory for the bodies of one cast, which the store owns.

    Attributes:
        fd: Its descriptor; -1 if the system gives none, then what is written is dropped.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._drawn = secrets.randbits(64)
        self._is_broken = False
        try:
            self.fd = os.memfd_create(memory_name(self._drawn), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            self.fd = -1

    def write(self, data: memoryview) -> None:
        """Add the next bytes; the end of memory breaks it, and nothing else."""
        while data and self.fd >= 0 and not self._is_broken:
            try:
                data = data[os.write(self.fd, data) :]
            except OSError:
                self._is_broken = True
                os.ftruncate(self.fd, 0)

    def where(self) -> bytes:
        """Seal it, and return what says where it is, or `NOWHERE`."""
        if self.fd < 0 or self._is_broken:
            return NOWHERE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        return WHERE.pack(os.getpid(), self.fd, self._size, self._drawn)


async def keep_casts(sock: socket.socket) -> None:
    """Keep what comes on the channel of casts, until it ends or the controller breaks its rules; both close it.

    Args:
        sock: Taken over.
    """
    store = CastStore()
    sock.setblocking(False)  # noqa: FBT003
    with trio.socket.from_stdlib_socket(sock) as channel:
        try:
            while (data := await receive_exactly(channel, REQUEST.size)) is not None:
                kind, number, size = read_request(data)
                if kind is CastRequest.LET_GO:
                    store.let_go(number)
                elif not await _keep(channel, store, number, size):
                    return
        except (OSError, ProtocolError):  # the controller sends in chunks what it sees not to be kept
            return
        finally:
            store.close()


async def _keep(channel: trio.socket.SocketType, store: CastStore, number: int, size: int) -> bool:
    """Keep the bodies of one cast, and answer. Return whether all of them have come."""
    one = store.open(number, size)
    piece = memoryview(bytearray(min(size, limits.HOST_CAST_READ_BYTES)))
    while size:
        n = await channel.recv_into(piece[:size])
        if not n:
            return False
        one.write(piece[:n])
        size -= n
    answer = memoryview(ANSWER.pack(number, one.where()))
    while answer:
        answer = answer[await channel.send(answer) :]
    return True
