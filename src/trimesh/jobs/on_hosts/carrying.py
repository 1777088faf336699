"""A TCP connection whose other half is in another process: its bytes go by two channels.

    socket --receive--> port ......> receiver --send--> socket      and the same in the other direction

CA-1 An empty item says that a direction has ended, and the other socket is told so while its own direction goes on.
CA-2 A direction that ends without it has failed, and so has the connection: it is reset, never ended as if whole.
CA-3 `limits.FORWARD_CHUNKS` of `limits.FORWARD_CHUNK_BYTES` are under way in a direction; then its socket is not read.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import trio

from trimesh import limits
from trimesh._runtime.channels import Port, Receiver

_END: Final = b""
_RESET: Final = struct.pack("ii", 1, 0)


async def carry(stream: trio.SocketStream, port: Port[bytes], receiver: Receiver[bytes]) -> None:
    """Carry the bytes of a connection until both directions have ended, or one has failed; close it."""
    is_whole = False
    try:
        async with trio.open_nursery() as nursery:
            failed = nursery.cancel_scope
            nursery.start_soon(_send_on, stream, port, failed)
            nursery.start_soon(_take, receiver, stream, failed)
        is_whole = not failed.cancel_called
    finally:
        port.close()
        if not is_whole:
            reset(stream)
        else:
            stream.socket.close()


def reset(stream: trio.SocketStream) -> None:
    """Close a connection so that the other side learns that it was not ended in order."""
    if stream.socket.fileno() >= 0:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        stream.socket.close()


async def _send_on(stream: trio.SocketStream, port: Port[bytes], failed: trio.CancelScope) -> None:
    try:
        while data := await stream.receive_some(limits.FORWARD_CHUNK_BYTES):
            await port.send(bytes(data))
        await port.send(_END)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        failed.cancel(reason="a forwarded connection was reset")


async def _take(receiver: Receiver[bytes], stream: trio.SocketStream, failed: trio.CancelScope) -> None:
    try:
        async for data in receiver:
            if not data:
                await stream.send_eof()
                return
            await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    failed.cancel(reason="a forwarded connection was reset")
