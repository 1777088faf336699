"""Take `trio.Cancelled` out of what was raised: it is Trio's to see, the rest is an error (E08)."""

from __future__ import annotations

from typing import cast

import trio


def split_cancelled(error: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
    """Return (the `Cancelled` part of `error`, the rest); either may be None."""
    if isinstance(error, trio.Cancelled):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        cancelled, rest = group.split(trio.Cancelled)
        return (None, group) if cancelled is None else (cancelled, rest)  # itself, not a copy
    return None, error
