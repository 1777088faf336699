"""The Python stack of another process's main thread, also while C code there holds the GIL.

A worker gives `faulthandler` a memory file and a signal; whoever owns the worker sends the signal and reads the file by
its name in /proc. Neither side's interpreter has to run for that.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

STACK_SIGNAL: Final = signal.SIGRTMAX - 3
"""Real-time signals have no meaning of their own; the topmost ones are the least used by libraries."""

STACK_BYTES_MAX: Final = 16_384
"""A stack of the 100 frames that faulthandler writes."""

STACK_SECONDS: Final = 0.05
"""From the signal to the reading of the file; a process that has not run by then is not running."""


def arm_stack() -> int:
    """Let this process write its main thread's stack when it gets `STACK_SIGNAL`; return the descriptor it goes to."""
    fd = os.memfd_create("trimesh-stack", os.MFD_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    return fd


def request_stack(pid: int) -> None:
    """Ask a process of ours for its stack. Nothing happens if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
    except OSError:
        return
    finally:
        os.close(pidfd)


def read_stack(pid: int, fd: int) -> str:
    """Return the stack that a process wrote last, innermost call first, or "" when there is none."""
    try:
        with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - STACK_BYTES_MAX))
            text = file.read(STACK_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    # The file is appended to at each request: the last stack is the one that was asked for.
    head = text.rfind("(most recent call first)")
    return text[text.rfind("\n", 0, max(0, head)) + 1 :].strip()
