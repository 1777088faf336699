"""Messages over a stream socket that blocks: their length in four bytes, then they themselves."""

from __future__ import annotations

import socket
import struct
from typing import Final

_LENGTH: Final = struct.Struct("!I")


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send one message.

    Blocking: until the kernel has taken it, or the time-out of the socket.

    Raises:
        OSError: The other end has gone, or takes nothing.
    """
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive_frame(sock: socket.socket, bytes_max: int) -> bytes | None:
    """Return the next message; None when the other end has said all.

    Blocking: until it has come, or the time-out of the socket.

    Raises:
        OSError: It has not come whole, or is larger than `bytes_max`.
    """
    head = _receive(sock, _LENGTH.size)
    if not head:
        return None
    [size] = _LENGTH.unpack(head)
    if size > bytes_max:
        raise OSError(f"a message must have at most {bytes_max} bytes, got {size}")
    data = _receive(sock, size)
    if len(data) < size:
        raise ConnectionResetError("the other end has gone in the middle of a message")
    return data


def _receive(sock: socket.socket, size: int) -> bytes:
    """Return `size` bytes; none at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            if data:
                raise ConnectionResetError("the other end has gone in the middle of a message")
            break
        data += part
    return bytes(data)
