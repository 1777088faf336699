"""Loader of libtrimesh: finds the library, declares its functions and maps its status codes.

`native/include/trimesh.h` is the contract; this file adds no declaration of its own. The build parses the header into
`declared.py`, as parsing is the slowest part of loading; a header other than that of the build is parsed when the
library is loaded. The first transport loads it, never `import trimesh`. Loading starts no thread and makes no
descriptor, so a process that forks others may do it first.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, Final, cast

import trio

from trimesh.config import reread
from trimesh.errors import LimitExceeded, TrimeshError, TrimeshInternalError

ABI_VERSION: Final = 16
"""The contract that the Python side was written for."""

_HERE: Final = Path(__file__).parent
_SOURCE_HEADER: Final = _HERE.parents[2] / "native" / "include" / "trimesh.h"


class NativeLibraryError(TrimeshError, ImportError):
    """libtrimesh is missing, or is not the one that belongs to these Python files."""


def read_contract(header: Path) -> Any:
    """Return the cffi instance that knows the types and functions of a header.

    Raises:
        NativeLibraryError: It cannot be read.
    """
    try:
        raw = header.read_bytes()
        text = raw.decode().split("/* cdef-begin */", 1)[1].split("/* cdef-end */", 1)[0]
    except (OSError, ValueError, IndexError) as error:
        raise NativeLibraryError(f"the contract of the native library cannot be read from {header}: {error}") from error
    declared = _declared(hashlib.sha256(raw).hexdigest())
    if declared is not None:
        return declared
    import cffi  # noqa: PLC0415 - with its parser of C it is a tenth of what a new process imports

    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi


def _declared(digest: str) -> Any:
    """Return what the build has made of the header, or None when it has seen another one, or none."""
    try:
        declared: Any = importlib.import_module("trimesh._native.declared")
    except ImportError:  # there was no build, or for a cffi that the one here cannot follow
        return None
    return declared.ffi if digest == declared.HEADER_DIGEST else None


def _locate() -> tuple[Path, Path]:
    """Return the library and its header.

    The setting `native_lib` names a library to use instead of the one in the package; its header is looked for beside
    it, then where the package has it.
    """
    library = Path(reread().native_lib or _HERE / "libtrimesh.so")
    if not library.exists():
        raise NativeLibraryError(
            f"the native library is not at {library}; in a source tree build it with: python -m ziglang build dev"
        )
    for header in (library.with_name("trimesh.h"), _HERE / "trimesh.h", _SOURCE_HEADER):
        if header.exists():
            return library, header
    raise NativeLibraryError(f"trimesh.h is neither beside {library} nor in {_HERE}")


class Library:
    """libtrimesh in this process.

    Attributes:
        ffi: The cffi instance that knows the types of the header.
        lib: The functions and constants of the header.
        path: The file that was loaded.
    """

    ffi: Any
    lib: Any
    path: Path

    def __init__(self, path: Path, header: Path) -> None:
        self.path = path
        self.ffi = read_contract(header)
        error_of_cffi = cast("type[Exception]", getattr(self.ffi, "error", OSError))
        try:
            # Never unloaded: its thread may still run when the interpreter, and with it this object, is taken down.
            self.lib = self.ffi.dlopen(str(path), self.ffi.RTLD_NOW | self.ffi.RTLD_NODELETE)
            found = int(self.lib.tm_abi_version())
        except (OSError, AttributeError, error_of_cffi) as error:
            raise NativeLibraryError(f"the native library {path} cannot be loaded: {error}") from error
        if found != ABI_VERSION:
            raise NativeLibraryError(
                f"the native library {path} has contract version {found}, these Python files need {ABI_VERSION}; "
                "build it again, or reinstall trimesh"
            )

    def limit(self, name: str) -> int | None:
        """Return a bound of the native library by its name in limits.zig, or None for an unknown one."""
        value = int(self.lib.tm_limit(name.encode()))
        return None if value < 0 else value


@functools.cache
def load() -> Library:
    """Load the library, once a process.

    Raises:
        NativeLibraryError: It is missing, cannot be loaded, or is of another version.
    """
    return Library(*_locate())


# ---- statuses of the native library as exceptions --------------------------------------------------------------------

OK: Final = 0
FULL: Final = 1
UNDER_WAY: Final = 2
ERR_ARGUMENT: Final = -1
ERR_LINK: Final = -2
ERR_DOWN: Final = -3
ERR_LIMIT: Final = -4
ERR_FORKED: Final = -5
ERR_STATE: Final = -6
ERR_TOO_LARGE: Final = -7
ERR_THREAD: Final = -8
ERR_PEER: Final = -9
ERR_GONE: Final = -10
ERR_REVOKED: Final = -11
ERR_DENIED: Final = -12
ERR_UNREACHABLE: Final = -13
ERR_SILENT: Final = -14
ERR_CANCELLED: Final = -15
ERR_TLS: Final = -16
ERR_TLS_PLAINTEXT: Final = -17
ERR_TLS_VERSION: Final = -18
ERR_TLS_CERTIFICATE: Final = -19
ERR_TLS_NAME: Final = -20
ERR_TLS_REFUSED: Final = -21
ERR_TLS_LATE: Final = -22
ERR_TLS_CUT: Final = -23
ERR_DEVICE: Final = -24
ERR_ERRNO: Final = -1000

_NAMES: Final = {
    ERR_ARGUMENT: "TM_ERR_ARGUMENT",
    ERR_LINK: "TM_ERR_LINK",
    ERR_DOWN: "TM_ERR_DOWN",
    ERR_STATE: "TM_ERR_STATE",
    ERR_TOO_LARGE: "TM_ERR_TOO_LARGE",
}


def error_of(status: int, doing: str, *, limit: str = "LINKS_MAX") -> Exception:
    """Return the exception for a negative status.

    Args:
        status: Status returned by the library.
        doing: Action that failed, for the text: "opening a link".
        limit: Name of the bound that TM_ERR_LIMIT stands for here.
    """
    if status <= ERR_ERRNO:
        number = ERR_ERRNO - status
        return OSError(number, f"{os.strerror(number)} while {doing}")
    if status == ERR_FORKED:
        return trio.ClosedResourceError(
            f"{doing}: this process was forked from one that uses trimesh; links and meshes stay with the parent"
        )
    if status == ERR_LIMIT:
        return LimitExceeded(limit, 0, f"{doing}: {limit} is reached")
    if status == ERR_THREAD:
        return OSError(errno.EAGAIN, f"the system gave no thread while {doing}")
    return TrimeshInternalError(f"{doing}: the native library said {_NAMES.get(status, status)}")


def check(status: int, doing: str, *, limit: str = "LINKS_MAX") -> int:
    """Return `status`, or raise what it stands for if it is negative."""
    if status < 0:
        raise error_of(status, doing, limit=limit)
    return status
