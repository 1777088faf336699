"""Bounds: their values in Python, in Zig and in the library that was built; and that each is used."""

from __future__ import annotations

import re
from pathlib import Path

from native import shared_limits

from trimesh import limits
from trimesh._native.lib import load

NAMES = {name for name in dir(limits) if name.isupper()}
SHARED = {name for name in NAMES if load().limit(name) is not None}
"""The library knows each bound of limits.zig by its name."""


def test_bounds_of_both_are_found():
    assert {"FRAME_HEADER_BYTES", "CHUNK_FLIGHT_BYTES_MAX", "SPIN_US_MAX", "TCP_STRANGERS_SHARE"} <= SHARED


def test_zig_has_the_values_of_python():
    assert shared_limits.ZIG.read_text() == shared_limits.written(), "write it anew: python -m native.shared_limits"


def test_library_is_built_with_these_values():
    assert {name: load().limit(name) for name in SHARED} == {name: getattr(limits, name) for name in SHARED}


def test_beats_between_hosts_are_counted_in_ticks_by_the_library() -> None:
    milliseconds, ticks = load().limit("HOST_TICK_MS"), load().limit("HOST_BEAT_TICKS")
    assert milliseconds is not None
    assert ticks is not None
    assert milliseconds * ticks == 1000 * limits.HOST_BEAT_SECONDS


def test_limit_of_an_unknown_name_is_none():
    assert load().limit("NO_SUCH_LIMIT") is None


def test_every_bound_is_used():
    source = Path(limits.__file__)
    text = "".join(path.read_text() for path in source.parent.rglob("*.py") if path != source)

    in_ticks = {"HOST_BEAT_SECONDS"}  # see above

    assert NAMES - SHARED - in_ticks - set(re.findall(r"\b[A-Z][A-Z_]+\b", text)) == set()
