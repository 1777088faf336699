"""Where control sockets are: `.runs/PID-ID` in the private folder of this user.

A socket is there from the moment it is listened at, because it gets its name then. One that has no listener was left by
a run that was killed; whoever comes across it removes it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._runtime.system.private_folder import credentials_of, entered, user_folder

_NAME: Final = re.compile(r"([0-9]+)-([0-9a-f]+)")


class Listener(msgspec.Struct, frozen=True, eq=False):
    """A control socket of this process.

    Attributes:
        sock: What it listens at.
    """

    sock: socket.socket
    name: str

    def close(self) -> None:
        """Remove the file, and end whoever waits for a connection."""
        with suppress(OSError), _entered() as (_, fd):
            os.unlink(self.name, dir_fd=fd)
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _entered() -> Generator[tuple[Path, int], None, None]:
    folder = user_folder()
    with entered(folder):
        pass
    with entered(folder / ".runs") as fd:
        yield folder / ".runs", fd


def listen(pid: int, proc_id: str) -> Listener:
    """Listen for those who look on.

    Raises:
        OSError: The folder cannot be trusted, or made; or there are no descriptors.
    """
    with _entered() as (_, fd):
        name = f"{pid}-{proc_id}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"/proc/self/fd/{fd}/{name}.new")  # paths of sockets have at most 107 bytes
            sock.listen(limits.CONTROL_CLIENTS_MAX)
            os.rename(f"{name}.new", name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            sock.close()
            raise
        return Listener(sock, name)


def runs() -> list[tuple[int, str]]:
    """Return the runs of this user on this machine that have a socket: pid of the controller, and name.

    Raises:
        OSError: The folder cannot be trusted.
    """
    with _entered() as (_, fd):
        found = [match for name in os.listdir(fd) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), match[0]) for match in found)


def dial(name: str) -> socket.socket | None:
    """Return a connection to a run; None if it has ended.

    Raises:
        PermissionError: Another user listens there.
        OSError: It cannot be connected to.
    """
    with _entered() as (_, fd):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limits.CONTROL_SECONDS)
        try:
            sock.connect(f"/proc/self/fd/{fd}/{name}")
            if credentials_of(sock)[1] != os.geteuid():
                raise PermissionError(f"the run {name} is of another user")
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            return None
        except BaseException:
            sock.close()
            raise
        return sock
