"""Tell which handlers SIGINT has before, inside and after a block; with Trio's, and with one of the user's."""

from __future__ import annotations

import signal
from typing import Any

import trio
from stage import say

from trimesh import this_host


def handler() -> str:
    """Name the handler."""
    found: Any = signal.getsignal(signal.SIGINT)
    return f"{found.__module__}.{found.__qualname__}"


async def main() -> None:
    """Look at each moment."""
    before = handler()
    async with this_host().spawn_procs({"n": 1}):
        inside = handler()
    after = handler()
    signal.signal(signal.SIGINT, own)
    async with this_host().spawn_procs({"n": 1}):
        own_inside = handler()
    found = {"before": before, "inside": inside, "after": after, "own": f"{own.__module__}.{own.__qualname__}"}
    say("handlers", **found, **{"own inside": own_inside})


def own(*_: object) -> None:
    """Be the user's handler."""


trio.run(main)
