"""Whole pieces over a socket that a channel of a session carries."""

from __future__ import annotations

import trio


async def receive_exactly(sock: trio.socket.SocketType, size: int) -> bytes | None:
    """Return so many bytes, or None at the end of the channel."""
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
