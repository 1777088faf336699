"""Meetings of a test and code that no cancel reaches: named pipes, where each end waits in `open` for the other."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio


def make_meetings(folder: Path, *names: str) -> list[str]:
    """Return paths, which may travel as arguments."""
    paths = [str(folder / name) for name in names]
    for path in paths:
        os.mkfifo(path)
    return paths


def come(path: str) -> None:
    """Block this thread, in the operating system, until the other side is there; one side comes, the other meets."""
    with open(path, "wb") as pipe:
        pipe.write(b"here")


def meet_now(path: str) -> None:
    """The same from the other side."""
    with open(path, "rb") as pipe:
        pipe.read()


async def meet(*paths: str) -> None:
    """The same while Trio runs on; for all of some paths."""
    async with trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(lambda path=path: trio.to_thread.run_sync(meet_now, path, abandon_on_cancel=True))


@contextmanager
def listening(path: str) -> Iterator[Callable[[float], bool]]:
    """Be there already, so that who comes does not wait; yields a function that blocks this thread until one has come.

    It takes seconds to wait at most, and tells whether anybody has.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield lambda seconds: bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
