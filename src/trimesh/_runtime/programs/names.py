"""Names of published handles: sockets in a folder of this user, which only this user may enter.

FN-1 The folder is private (`system/private_folder.py`), so that no other user can put itself in between.
FN-2 Who takes, clears or judges a name holds the lock of the folder, so that a name without a listener is never taken
     for one that is just being taken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from trimesh import limits
from trimesh._native.lib import ABI_VERSION
from trimesh._runtime.spawner import wire
from trimesh._runtime.system.user_files import credentials_of, entered, user_folder
from trimesh.errors import ConnectError
from trimesh.ids import ProcId

FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def checked_program_name(name: Any) -> str:
    """Return a name under which handles may be published; see `checked_file_name`."""
    return checked_file_name(name, "a published name", limits.PUBLISHED_NAME_CHARS_MAX)


def checked_file_name(name: Any, what: str, chars_max: int) -> str:
    """Return a name that a file may have.

    Args:
        what: What it is, for the text of errors.
        chars_max: How long it may be.

    Raises:
        TypeError: It is no text.
        ValueError: It has other characters, or too many.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a text, got {name!r}")
    if not FILE_NAME.fullmatch(name) or len(name) > chars_max:
        raise ValueError(
            f"{what} must be 1 to {chars_max} letters, digits, '_', '-' or '.', the first one a letter, digit or '_', "
            f"got {name!r}"
        )
    return name


@contextmanager
def _entered() -> Generator[tuple[Path, int], None, None]:
    """Open the folder; make it if it is missing.

    Raises:
        ConnectError: It cannot be trusted, or not be made.
    """
    folder = user_folder()
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(entered(folder))
        except OSError as error:
            raise ConnectError(f"published names are in the folder {folder}, which cannot be used: {error}") from error
        yield folder, fd


@contextmanager
def _locked(fd: int) -> Generator[None, None, None]:
    """Hold the lock of the folder; those who do hold it for microseconds and wait for nothing meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _reach(fd: int, name: str) -> socket.socket | None:
    """Return a connection to who listens at a name; None if there is no listener.

    Raises:
        FileNotFoundError: There is no such name.
        BlockingIOError: Too many connect at this moment.
    """
    sock = _socket()
    try:
        sock.connect(f"/proc/self/fd/{fd}/{name}")  # paths of sockets have at most 107 bytes
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


class TakenName:
    """A name that this program listens at.

    Attributes:
        listener: Where others connect; not blocking.
    """

    def __init__(self, name: str, listener: socket.socket, inode: int) -> None:
        self.name = name
        self.listener = listener
        self._inode = inode

    def give_back(self) -> None:
        """Stop listening, and remove the name unless it is another program's by now."""
        self.listener.close()
        with suppress(ConnectError, OSError), _entered() as (_, fd), _locked(fd):
            if os.stat(self.name, dir_fd=fd).st_ino == self._inode:
                os.unlink(self.name, dir_fd=fd)

    def forget(self) -> None:
        """In a forked child: close our copy."""
        self.listener.close()


def take_name(name: str) -> TakenName:
    """Listen at a name; one whose program has ended is taken over.

    Raises:
        ConnectError: Another program listens there, or the folder cannot be used.
    """
    with _entered() as (folder, fd), _locked(fd):
        try:
            taken: socket.socket | None = _reach(fd, name)
            is_busy = False
        except FileNotFoundError:
            taken, is_busy = None, False
        except BlockingIOError:
            taken, is_busy = None, True
        if taken is not None or is_busy:
            who = "another program"
            if taken is not None:
                who = f"process {credentials_of(taken)[0]}"
                taken.close()
            raise ConnectError(f"a name is published once, and {name!r} is by {who}: take another name, or end that")
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        listener = _socket()
        try:
            listener.bind(f"/proc/self/fd/{fd}/{name}")
            listener.listen(limits.PROGRAM_CLIENTS_MAX)
            return TakenName(name, listener, os.stat(name, dir_fd=fd).st_ino)
        except OSError as error:
            listener.close()
            raise ConnectError(f"{folder / name} cannot be listened at: {error}") from error


def dial(name: str) -> socket.socket | None:
    """Return a connection to the program of this user that publishes a name; None while too many connect.

    Raises:
        ConnectError: There is none, or its program has ended; what is left of that is removed.
    """
    with _entered() as (folder, fd):
        try:
            sock = _reach(fd, name)
            if sock is None:  # perhaps it is just being taken: none is while this holds the lock
                with _locked(fd):
                    sock = _reach(fd, name)
                    if sock is None:
                        os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            known = ", ".join(sorted(filter(FILE_NAME.fullmatch, os.listdir(fd)))) or "none"
            raise ConnectError(
                f"no program of this user publishes {name!r} on this host (in {folder}); published are: {known}"
            ) from None
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return None
            raise ConnectError(f"{folder / name} cannot be connected to: {error}") from error
    if sock is None:
        raise ConnectError(f"the program that published {name!r} has ended; what it left in {folder} was removed")
    if credentials_of(sock)[1] != os.geteuid():
        sock.close()
        raise ConnectError(f"{name!r} is published by another user, user {os.geteuid()} needs one of its own")
    return sock


# ---- what two programs tell each other of themselves before anything else, and whether they fit ----------------------


def side_of(*, pickled: bool, proc_id: ProcId) -> wire.Side:
    """Return what this program says of itself."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - few programs need it

    try:
        own = version("trimesh-actors")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    return wire.Side(
        trimesh=own,
        protocol=ABI_VERSION,
        python=f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        pickle="on" if pickled else "off",
        pid=os.getpid(),
        program=Path(sys.argv[0] or "python").name,
        proc_id=proc_id,
    )


def check_fit(ours: wire.Side, theirs: wire.Side) -> None:
    """Refuse a program whose messages this one could not read, or must not.

    Raises:
        ConnectError: They differ; both are named.
    """
    for what, own, other in (
        ("the same version of trimesh", (ours.trimesh, ours.protocol), (theirs.trimesh, theirs.protocol)),
        ("the same Python", ours.python, theirs.python),
        ("the same pickle=", ours.pickle, theirs.pickle),
    ):
        if own != other:
            raise ConnectError(
                f"programs that connect must have {what}: {_name(ours)} has {_text(own)}, "
                f"{_name(theirs)} has {_text(other)}"
            )


def _name(side: wire.Side) -> str:
    return f"{side.program} (pid {side.pid})"


def _text(value: str | tuple[str, int]) -> str:
    return value if isinstance(value, str) else f"{value[0]} (protocol {value[1]})"
