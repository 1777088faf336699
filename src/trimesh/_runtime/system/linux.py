"""Linux calls that Python's library lacks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_PIDFD_SIGNAL_PROCESS_GROUP: Final = 4

MARKER: Final = "TRIMESH_PROC"
"""Environment variable that every process of a family carries; see `ProcessMarker`."""

_MARKER_CHARS: Final = 33

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getenv.restype = ctypes.c_void_p
_libc.getenv.argtypes = (ctypes.c_char_p,)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Make the kernel send `signum` when the *thread* that forked this process ends; 0 for none.

    The caller must check afterwards that its parent still lives: if it died before, no signal comes.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show; cut after 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def marker_of(root_id: int, proc_id: int) -> str:
    """Return the marker of a process: family and process, of fixed length."""
    marker = f"{root_id:016x}.{proc_id:016x}"
    assert len(marker) == _MARKER_CHARS
    return marker


class ProcessMarker:
    """The marker of this process, in the environment that the kernel shows in `/proc/PID/environ`.

    A forked process shows the environment its ancestor was *executed* with, whatever `setenv` does; so the value is
    overwritten in place. Fork and exec inherit it and `setsid` keeps it: it identifies a descendant of a worker even
    after the descendant's own parents have ended.

    Made early, before anything replaces the variable: the process must have been executed with it.

    Attributes:
        family: First half of the marker: the controller, or its stand-in on this host.
    """

    family: int = 0

    def __init__(self) -> None:
        self._address: int | None = _libc.getenv(MARKER.encode())

    def write(self, proc_id: int) -> None:
        """Overwrite the marker with that of a process; this one was executed with a marker of the same length."""
        marker = marker_of(self.family, proc_id)
        if self._address is not None and len(ctypes.string_at(self._address)) == len(marker):
            ctypes.memmove(self._address, marker.encode(), len(marker))


def signal_group(pidfd: int, signum: int) -> bool:
    """Send `signum` to the process group led by the process of `pidfd`, which may have ended; its pid is not used.

    Returns:
        False when the kernel cannot (before Linux 6.9), or does not let this process: a sandbox refuses the call, or
        the group acts for another user. Its parent, the spawner, may be able to.
    """
    try:
        signal.pidfd_send_signal(pidfd, signum, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:  # no member of the group is left
        return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return False
    return True


def close_others(kept: set[int]) -> None:
    """Close every descriptor of this process that is not in `kept`, except those of shared libraries.

    libffi keeps its own file open to map the code of callbacks from it. Without that descriptor ctypes soon fails to
    make more callbacks, or maps another file that has reused the number.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if ".so" not in os.path.basename(os.readlink(f"/proc/self/fd/{name}")):
                    os.close(int(name))


# ---- system calls that a sandbox or a bare root may refuse: probed when something has failed -------------------------

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
    """Return which system calls this process is refused, in parentheses after a blank; "" for none.

    Cost: a few system calls; call it only after a failure.
    """
    if not has_proc():
        return " (/proc is not mounted here, and trimesh finds its processes there: mount it)"
    refused: list[str] = []
    for name, probe in _PROBES.items():
        try:
            probe()
        except OSError as error:
            if error.errno in _REFUSALS:
                refused.append(name)
    if not refused:
        return ""
    return f" (the system refuses {', '.join(refused)} to this process: allow that in its sandbox, such as seccomp)"


def has_proc() -> bool:
    """Return whether /proc is mounted, with this process in it."""
    return Path("/proc/self/fd").exists()
