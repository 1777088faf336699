"""What goes over the channel of casts between a controller and the agent of a host, and between two agents.

    controller -> agent   u8 kind, 7 zeros, u64 number, u64 size, u64 agent
                          1 = KEEP: so many bytes follow; keep them
                          2 = LET_GO: no process of the host needs them any more, and no other host
                          3 = FED: keep so many bytes, which that agent feeds
                          4 = FEED: feed that agent what the next KEEP or FED is about; the number is the other host's
    agent -> controller   u64 number, u64 agent, then what says to processes of the host where they are; zeros if it
                          cannot keep them. One answer to each KEEP and FED; with an agent: that one could not be fed
    agent -> agent        the bytes, on a channel whose purpose says the number
                  <-      one zero, when all have come

Numbers of KEEP and FED grow. The agent takes no more than `limits.HOST_CAST_BYTES` and `limits.HOST_CASTS_MAX` at a
time.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from trimesh import limits
from trimesh._transport.messages.incoming import WHERE
from trimesh.errors import ProtocolError
from trimesh.ids import ID_MAX

REQUEST: Final = struct.Struct("<BxxxxxxxQQQ")
ANSWER: Final = struct.Struct(f"<QQ{WHERE.size}s")
NOWHERE: Final = bytes(WHERE.size)
"""What is answered when the bytes cannot be kept."""


class CastRequest(IntEnum):
    """What a controller asks."""

    KEEP = 1
    LET_GO = 2
    FED = 3
    FEED = 4


_SIZED: Final = (CastRequest.KEEP, CastRequest.FED)
_WITH_AGENT: Final = (CastRequest.FED, CastRequest.FEED)


def read_request(data: bytes) -> tuple[CastRequest, int, int, int]:
    """Return kind, number, size and agent of a request.

    Raises:
        ProtocolError: It is none.
    """
    kind, number, size, agent = REQUEST.unpack(data)
    if kind not in tuple(CastRequest) or data[1:8] != bytes(7):
        raise ProtocolError(f"a request about casts is of kind 1 to 4, then zeros, got {data[:8].hex()}")
    kind = CastRequest(kind)
    if (size == 0) is (kind in _SIZED) or size > limits.HOST_CAST_BYTES:
        raise ProtocolError(f"a cast has at most {limits.HOST_CAST_BYTES} bytes, got {size} for {kind.name}")
    if (agent == 0) is (kind in _WITH_AGENT) or agent > ID_MAX:
        raise ProtocolError(f"FED and FEED name an agent, got {agent} for {kind.name}")
    return kind, number, size, agent
