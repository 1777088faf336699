"""Network namespaces without names: each is a descriptor of this process, and ends with its last user.

NN-1 Nothing of a namespace outlives the descriptors and processes in it, also where this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import trio

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"
_KEPT_THREAD: Final = "Trio thread"
_SYSTEM_PATH: Final = "/usr/sbin:/sbin:/usr/bin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)


class NetNamespace:
    """A network namespace that is new and empty: not even its loopback is up.

    Raises:
        OSError: This user may not make one.
    """

    def __init__(self) -> None:
        made = list[int | OSError]()

        def make() -> None:
            try:
                _check(_libc.unshare(_CLONE_NEWNET), "unshare")
                made.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="new namespace")  # a thread can be in one by itself
        thread.start()
        thread.join()
        (found,) = made
        if isinstance(found, OSError):
            raise found
        self._fd = found

    @property
    def path(self) -> str:
        """A name for it, for other processes of this user while it is open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def prefix(self) -> list[str]:
        """What runs a command in it, in front of that; the process stays the same."""
        return [tool("nsenter"), f"--net={self.path}", "--"]

    def run(self, command: Sequence[str], text: str = "") -> str:
        """Run a command in it, with `text` as its input; return what it has written.

        Raises:
            RuntimeError: It has failed; the error has its words.

        Blocking: some milliseconds.
        """
        found = subprocess.run(  # noqa: S603 - the command is a test's own
            [*self.prefix, tool(command[0]), *command[1:]], input=text, capture_output=True, text=True, check=False
        )
        if found.returncode != 0:
            words = found.stderr.strip() or found.stdout.strip()
            raise RuntimeError(f"{' '.join(command)} has failed: {words}; its input was:\n{text}")
        return found.stdout

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Have this thread, what it starts, and the sockets that it makes, be in it while the body runs.

        Threads of Trio that wait for work go with it, there and back: processes are started by them.

        Raises:
            OSError: This user may not.
        """
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._fd)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def close(self) -> None:
        """Leave it to the processes in it; without any it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _enter(fd: int) -> None:
    """Have this thread, and those that Trio keeps for later, be in a namespace: each is where its maker was.

    Raises:
        OSError: This user may not.
    """
    _check(_libc.setns(fd, _CLONE_NEWNET), "setns")
    count = sum(thread.name.startswith(_KEPT_THREAD) for thread in threading.enumerate())
    met = threading.Barrier(count + 1)

    def enter() -> None:
        _libc.setns(fd, _CLONE_NEWNET)
        met.wait()  # so that each of these calls has a thread of its own

    for _ in range(count):
        trio.lowlevel.start_thread_soon(enter, lambda _: None)
    met.wait()


def tool(name: str) -> str:
    """Return the path of a command of the system, or its name where there is none."""
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH) or name


def missing_tools(names: Sequence[str]) -> list[str]:
    """Return which commands are not there."""
    return [name for name in names if os.path.basename(tool(name)) == tool(name)]


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
