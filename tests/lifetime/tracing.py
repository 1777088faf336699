"""What a debugger does to a process: hold all its threads, or hold it at its exit.

The latter is what the kernel makes of a process in an uninterruptible wait: one that SIGKILL does not end (Z08).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PTRACE_SEIZE: Final = 0x4206
_PTRACE_INTERRUPT: Final = 0x4207
_PTRACE_DETACH: Final = 17
_PTRACE_CONT: Final = 7
_PTRACE_O_TRACEEXIT: Final = 0x40
_WALL: Final = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def undying(pid: int) -> Iterator[None]:
    """Keep a process from ending; leaving this ends it. It must have allowed to be traced (`Quiet.allow_tracer`)."""
    _ptrace(_PTRACE_SEIZE, pid, _PTRACE_O_TRACEEXIT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        while os.WIFSTOPPED(os.waitpid(pid, _WALL)[1]):
            _ptrace(_PTRACE_CONT, pid, 0)


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Stop all threads of a process as a debugger does. It must have allowed to be traced."""
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for thread in threads:
        _ptrace(_PTRACE_SEIZE, thread, 0)
        _ptrace(_PTRACE_INTERRUPT, thread, 0)
        os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        for thread in threads:
            _ptrace(_PTRACE_DETACH, thread, 0)


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")
