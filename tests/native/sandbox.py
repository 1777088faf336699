"""A sandbox as containers have it: a filter of the kernel (seccomp) that refuses calls to a process, for good."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

_EVERYWHERE: Final = {"pidfd_send_signal": 424, "pidfd_open": 434}
_MACHINES: Final = {
    "x86_64": (
        0xC000003E,
        {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, **_EVERYWHERE},
        317,
    ),
    "aarch64": (
        0xC00000B7,
        {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, **_EVERYWHERE},
        277,
    ),
}
"""For each: what the kernel calls it, its numbers of the calls, and that of seccomp."""

_PR_SET_NO_NEW_PRIVS: Final = 38
_SET_MODE_FILTER: Final = 1
_ALL_THREADS: Final = 1
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_MACHINE = 0, 4


def refuse(*calls: str, error: int = errno.EPERM) -> None:
    """Have the kernel refuse system calls to all threads of this process, and to all that it starts, from now on."""
    machine, numbers, seccomp = _MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _AT_MACHINE),
        (_JUMP_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _AT_NUMBER),
        *((_JUMP_EQUAL, len(calls) - index, 0, numbers[name]) for index, name in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | error),
    ]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    if libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, head) != 0:
        raise OSError(ctypes.get_errno(), "the filter was refused")


def why_not() -> str:
    """Return why there can be no such filter here; "" when there can."""
    if platform.machine() not in _MACHINES:
        return f"the numbers of system calls are not known for {platform.machine()}"
    if not os.path.exists("/proc/sys/kernel/seccomp"):
        return "this kernel has no seccomp"
    return ""
