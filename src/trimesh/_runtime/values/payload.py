"""Where the payload of a message lies: in its head, or, when it is large, as the first of its bodies."""

from __future__ import annotations

from collections.abc import Sequence

from trimesh import limits
from trimesh._transport.interface import Buffer
from trimesh._wire.pickled.payload import Encoded


def place_payload(value: Encoded) -> tuple[bytes, Sequence[Buffer]]:
    """Return (what rides in the head, bodies): a large payload becomes the first body."""
    if len(value.payload) <= limits.HEAD_PAYLOAD_BYTES_MAX:
        return value.payload, value.buffers
    return b"", [value.payload, *value.buffers]


def take_payload(payload: bytes, bodies: list[memoryview]) -> tuple[Buffer, list[memoryview]]:
    """Undo `place_payload`: return (payload, buffers). A message without any payload gives an empty one."""
    if payload or not bodies:
        return payload, bodies
    return bodies[0], bodies[1:]
