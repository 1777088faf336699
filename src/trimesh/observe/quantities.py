"""Seconds and bytes as text for people."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def duration(seconds: float) -> str:
    """Return seconds for people: 0.25 s, 3.2 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(nbytes: float) -> str:
    at = 0
    while nbytes >= 1024 and at < len(_UNITS) - 1:
        nbytes /= 1024
        at += 1
    return f"{nbytes:.0f} {_UNITS[at]}" if at < 2 else f"{nbytes:.1f} {_UNITS[at]}"
