"""How the places of members are written."""

from __future__ import annotations

from collections.abc import Mapping


def coordinates(point: Mapping[str, int]) -> str:
    """Return the coordinates of a member for people and for traces: `{gpus=2}`."""
    return "{" + ", ".join(f"{label}={index}" for label, index in point.items()) + "}"
