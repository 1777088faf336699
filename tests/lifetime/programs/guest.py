"""Trio as the guest of an asyncio loop, as programs with two loops make it themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import trio


def run_as_guest(main: Callable[[], Awaitable[None]], **options: Any) -> None:
    """Run `main` in Trio; options are those of `trio.run`. SIGINT stays Trio's: `asyncio.run` would take it over."""
    loop = asyncio.new_event_loop()
    over = loop.create_future()
    trio.lowlevel.start_guest_run(
        main,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=over.set_result,
        host_uses_signal_set_wakeup_fd=True,
        **options,
    )
    try:
        loop.run_until_complete(over).unwrap()
    finally:
        loop.close()
