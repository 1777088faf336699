"""Finds libtrimesh, reads its contract and calls it.

`native/include/trimesh.h` is the contract; this file adds no declaration of its own. Loading costs about 2 ms and
happens when the first transport is made, never on `import trimesh`. Loading starts no thread and makes no descriptor,
so a process that forks others may do it first.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final

import cffi

from trimesh.errors import TrimeshError

ABI_VERSION: Final = 6
"""The contract that the Python side was written for."""

_HERE: Final = Path(__file__).parent
_SOURCE_HEADER: Final = _HERE.parents[2] / "native" / "include" / "trimesh.h"


class NativeLibraryError(TrimeshError, ImportError):
    """libtrimesh is missing, or is not the one that belongs to these Python files."""


def _declarations(header: Path) -> str:
    """Return the part of the header that cffi can read."""
    try:
        text = header.read_text(encoding="utf-8")
        return text.split("/* cdef-begin */", 1)[1].split("/* cdef-end */", 1)[0]
    except (OSError, IndexError) as error:
        raise NativeLibraryError(f"the contract of the native library cannot be read from {header}: {error}") from error


def _locate() -> tuple[Path, Path]:
    """Return the library and its header.

    `TRIMESH_NATIVE_LIB` names a library to use instead of the one in the package; its header is looked for beside it,
    then where the package has it.
    """
    library = Path(os.environ.get("TRIMESH_NATIVE_LIB") or _HERE / "libtrimesh.so")
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
        self.ffi = cffi.FFI()
        self.ffi.cdef(_declarations(header))
        try:
            # Never unloaded: its thread may still run when the interpreter, and with it this object, is taken down.
            self.lib = self.ffi.dlopen(str(path), self.ffi.RTLD_NOW | self.ffi.RTLD_NODELETE)
            found = int(self.lib.tm_abi_version())
        except (OSError, AttributeError) as error:
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
