"""Running processes, kept to some cores for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def on_one_core(*pids: int) -> Iterator[None]:
    """Keep all threads of some processes to one core; afterwards they may use all that this process may."""
    allowed = os.sched_getaffinity(0)
    _allow(pids, {min(allowed)})
    try:
        yield
    finally:
        _allow(pids, allowed)


def _allow(pids: tuple[int, ...], cores: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # the process has ended meanwhile
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):  # or the thread
                    os.sched_setaffinity(int(thread), cores)
