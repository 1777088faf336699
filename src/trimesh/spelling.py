"""Suggestions for misspelt names, for the texts of errors."""

from __future__ import annotations

from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (is it gpus?)" for the known name that is nearest to one that is none; empty if none is near."""
    import difflib  # noqa: PLC0415 - only wrong names need it

    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f" (is it {by_lower[near[0]]}?)" if near else ""
