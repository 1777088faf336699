"""A folder that only this user may enter: for sockets by name, and for what runs leave behind.

    trimesh in $XDG_RUNTIME_DIR, or trimesh-UID in /tmp where that is not set

A folder of another user, one that others may enter, or a link in its place is refused: whoever owns it could put itself
in between.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")


def user_folder() -> Path:
    """Return where the sockets of this user are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "trimesh"
    return Path("/tmp") / f"trimesh-{os.geteuid()}"  # noqa: S108 - its owner and mode are checked


@contextmanager
def entered(folder: Path) -> Generator[int, None, None]:
    """Open a private folder; make it if it is missing.

    Raises:
        PermissionError: It is not this user's, or others may enter it.
        OSError: It cannot be made, or is none.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(
                f"the folder {folder} must be of user {os.geteuid()} and of mode 0700, "
                f"got user {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}: remove it, or set XDG_RUNTIME_DIR"
            )
        yield fd
    finally:
        os.close(fd)


def credentials_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a socket."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
