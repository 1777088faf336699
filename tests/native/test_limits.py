"""trimesh.limits and limits.zig say the same."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rows import rows

from trimesh import limits
from trimesh._native.lib import load

SHARED = [name for name in dir(limits) if name.isupper() and load().limit(name) is not None]
"""The library knows each bound of limits.zig by its name."""


def test_bounds_of_both_are_found() -> None:
    assert {"FRAME_HEADER_BYTES", "CHUNK_FLIGHT_BYTES_MAX", "SPIN_US_MAX", "TCP_STRANGERS_SHARE"} <= set(SHARED)


@rows("name", SHARED)
def test_limit_is_the_same_in_both_languages(name: str):
    assert load().limit(name) == getattr(limits, name)


def test_limit_of_an_unknown_name_is_none():
    assert load().limit("NO_SUCH_LIMIT") is None


def test_every_bound_is_used() -> None:
    folder = Path(limits.__file__).parent
    text = "".join(path.read_text() for path in folder.parent.rglob("*.py") if path.parent != folder)
    used = set(re.findall(r"\b[A-Z][A-Z_]+\b", text)) | set(SHARED)

    assert {name for name in dir(limits) if name.isupper()} - used == set()
