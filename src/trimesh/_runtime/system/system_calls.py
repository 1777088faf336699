"""What this library asks of the system that a sandbox or a bare root may refuse: found when something has failed."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

_REFUSALS: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def _probe_memfd() -> None:
    os.close(os.memfd_create("trimesh-probe"))


def _probe_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _probe_signal() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def _probe_eventfd() -> None:
    os.close(os.eventfd(0))


_PROBES: Final[dict[str, Callable[[], None]]] = {
    "memfd_create": _probe_memfd,
    "pidfd_open": _probe_pidfd,
    "pidfd_send_signal": _probe_signal,
    "eventfd2": _probe_eventfd,
}


def refusals() -> str:
    """Return what the system refuses to this process, as a sentence that begins with a blank; "" for nothing.

    Cost: a few system calls; ask only when something has failed.
    """
    if not has_proc():
        return " (/proc is not mounted here, and trimesh reads of its own processes there: mount it)"
    refused: list[str] = []
    for name, probe in _PROBES.items():
        try:
            probe()
        except OSError as error:
            if error.errno in _REFUSALS:
                refused.append(name)
    if not refused:
        return ""
    return f" (the system refuses {', '.join(refused)} to this process: let its sandbox, such as seccomp, allow that)"


def has_proc() -> bool:
    """Return whether this process finds itself in /proc."""
    return Path("/proc/self/fd").exists()
