"""trimesh.limits and limits.zig say the same."""

from __future__ import annotations

import pytest

from trimesh import limits
from trimesh._native.lib import load

SHARED = [
    "FRAME_HEADER_BYTES",
    "FRAME_PAYLOAD_BYTES_MAX",
    "HEAD_BYTES_MAX",
    "BODIES_MAX",
    "MESSAGE_BYTES_MAX",
    "RING_BYTES",
    "RING_CONTROL_RESERVE_BYTES",
    "LINKS_MAX",
    "SEGMENT_BYTES_MIN",
    "SEGMENT_BYTES_MAX",
    "SEGMENT_POOL_BYTES_MAX",
    "SEGMENTS_MAX",
    "SEGMENT_FLIGHT_BYTES_MAX",
    "SEGMENT_IDLE_BYTES_MAX",
    "FAULT_RULES_MAX",
    "GRANTS_MAX",
    "BLOCKS_MAX",
    "BLOCK_BYTES_MAX",
    "BLOCK_IDLE_BYTES_MAX",
    "VISITS_MAX",
    "TRANSFERS_MAX",
    "VIEWS_MAX",
    "INLINE_BYTES_MAX",
    "EXPORT_BYTES_MAX",
    "MOVER_SILENCE_MS",
    "LOOK_US_MAX",
    "TCP_STRANGERS_SHARE",
]


@pytest.mark.parametrize("name", SHARED)
def test_limit_is_the_same_in_both_languages(name: str):
    assert load().limit(name) == getattr(limits, name)


def test_limit_of_an_unknown_name_is_none():
    assert load().limit("NO_SUCH_LIMIT") is None
