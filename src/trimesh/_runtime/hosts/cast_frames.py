"""What goes over the channel of casts between a controller and the agent of a host.

    controller -> agent   u8 1 = KEEP, 7 zeros, u64 number, u64 size, then so many bytes: keep them
                          u8 2 = LET_GO, 7 zeros, u64 number, u64 0: no process of the host needs them any more
    agent -> controller   u64 number, then what says to processes of the host where they are; zeros if it cannot
                          keep them. One answer to each KEEP.

Numbers grow. The agent takes no more than `limits.HOST_CAST_BYTES` and `limits.HOST_CASTS_MAX` at a time.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import trio

from trimesh import limits
from trimesh._transport.messages.host_memory import WHERE
from trimesh.errors import ProtocolError

REQUEST: Final = struct.Struct("<BxxxxxxxQQ")
ANSWER: Final = struct.Struct(f"<Q{WHERE.size}s")
NOWHERE: Final = bytes(WHERE.size)
"""What is answered when the bytes cannot be kept."""


class CastRequest(IntEnum):
    """What a controller asks."""

    KEEP = 1
    LET_GO = 2


def read_request(data: bytes) -> tuple[CastRequest, int, int]:
    """Return kind, number and size of a request.

    Raises:
        ProtocolError: It is none.
    """
    kind, number, size = REQUEST.unpack(data)
    if kind not in tuple(CastRequest) or data[1:8] != bytes(7):
        raise ProtocolError(f"a request about casts is of kind 1 or 2, then zeros, got {data[:8].hex()}")
    if (size == 0) is (kind == CastRequest.KEEP) or size > limits.HOST_CAST_BYTES:
        raise ProtocolError(
            f"a cast has at most {limits.HOST_CAST_BYTES} bytes, got {size} for {CastRequest(kind).name}"
        )
    return CastRequest(kind), number, size


async def receive_exactly(sock: trio.socket.SocketType, size: int) -> bytes | None:
    """Return so many bytes, or None at the end of the channel."""
    found = bytearray()
    while len(found) < size:
        data = await sock.recv(size - len(found))
        if not data:
            return None
        found += data
    return bytes(found)
