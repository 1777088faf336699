"""Private folder of this user: for named sockets, and for files that runs leave behind.

    trimesh in $XDG_RUNTIME_DIR, or trimesh-UID in /tmp if that is not set

A folder of another user, one that others may enter, or a link in its place is refused: its owner could intercept
connections.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from trimesh.config import Sources
from trimesh.errors import ConfigError

_CREDENTIALS: Final = struct.Struct("3i")


def user_folder() -> Path:
    """Return the folder of this user's sockets."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "trimesh"
    return Path("/tmp") / f"trimesh-{os.geteuid()}"  # noqa: S108 - its owner and mode are checked


@contextmanager
def entered(folder: Path) -> Generator[int, None, None]:
    """Open a private folder; make it if it is missing.

    Raises:
        PermissionError: It belongs to another user, or others may enter it.
        OSError: It cannot be made, or is not a folder.
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


# ---- sources of settings: the file nearest to the working directory, and the environment -----------------------------

_VARIABLE: Final = "TRIMESH_CONFIG"
_OWN: Final = "trimesh.toml"
_PROJECT: Final = "pyproject.toml"


def read_sources() -> Sources:
    """Return the settings of the file, which is located once, and of the present environment.

    Raises:
        ConfigError: The file cannot be read, or another user may write it.
    """
    table, file = _found(os.environ.get(_VARIABLE))
    return Sources(os.environ, table, file)


@functools.cache
def _found(named: str | None) -> tuple[Mapping[str, Any], str]:
    if named is not None:
        return (_table(Path(named)) or {}, named) if named else ({}, "")
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed meanwhile
        return {}, ""
    for folder in (here, *here.parents):
        for name in (_OWN, _PROJECT):
            path = folder / name
            table = _table(path) if path.is_file() else None
            if table is not None:
                return table, str(path)
    return {}, ""


def _table(path: Path) -> Mapping[str, Any] | None:
    """Return the settings of a file; None for a project's file without settings of trimesh.

    Raises:
        ConfigError: It cannot be read, or an untrusted user may write it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
        if path.name == _PROJECT and b"trimesh" not in text:
            return None
        import tomllib  # noqa: PLC0415 - many programs have no such file

        whole = tomllib.loads(text.decode())
    except (OSError, ValueError) as error:
        if path.name == _PROJECT and not isinstance(error, OSError):
            return None  # other tools of the project report that
        raise ConfigError(f"{path} cannot be read: {error}") from error
    table = whole.get("tool", {}).get("trimesh") if path.name == _PROJECT else whole
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.trimesh must be a table of settings, got {table!r}")
    _check_owner(path, status)
    return table  # pyright: ignore[reportUnknownVariableType]  # of whatever TOML has


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"a file of settings must belong to this user or to root, got {path} of user {status.st_uid}: "
            f"copy it, or set {_VARIABLE}= to a file of yours, or to nothing for none"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"a file of settings must not be writable for all users, got {path}: chmod o-w {path}")
