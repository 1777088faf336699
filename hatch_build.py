"""Compiles the native library with the Zig compiler that the build requirements bring.

pip, hatch and build run this as a hatchling hook; `make build-native` runs it as a script. A wheel packs the library,
its header, and what cffi makes of that, as `trimesh/_native/`; an editable install, and the script, put them into
`src/trimesh/_native/`.

TRIMESH_ZIG_TARGET names another target than this machine (one of `TARGETS`), for cross wheels. Zig's caches stay in
`.zig-cache/` of the source tree, unless ZIG_LOCAL_CACHE_DIR and ZIG_GLOBAL_CACHE_DIR say otherwise.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cffi
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGETS = {
    "x86_64-linux-gnu.2.17": "manylinux_2_17_x86_64.manylinux2014_x86_64",
    "aarch64-linux-gnu.2.17": "manylinux_2_17_aarch64.manylinux2014_aarch64",
    "x86_64-linux-musl": "musllinux_1_2_x86_64",
    "aarch64-linux-musl": "musllinux_1_2_aarch64",
}
"""Zig target and the platform tag of the wheel made for it."""

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}

LIBRARY = "libtrimesh.so"
HEADER = "trimesh.h"
DECLARED = "declared.py"
TARGET_VARIABLE = "TRIMESH_ZIG_TARGET"


class UnsupportedPlatformError(RuntimeError):
    """The native library cannot be built for this platform."""


def zig_target() -> str:
    """Return the Zig target to build for: the one asked for, else this machine's.

    Raises:
        UnsupportedPlatformError: There is none; the text says what is supported.
    """
    supported = f"trimesh runs on 64-bit Linux on x86_64 and aarch64; set {TARGET_VARIABLE} to one of {list(TARGETS)}"
    asked = os.environ.get(TARGET_VARIABLE)
    if asked is not None:
        if asked not in TARGETS:
            raise UnsupportedPlatformError(f"{supported}, got {asked!r}")
        return asked
    machine = MACHINES.get(platform.machine().lower())
    if sys.platform != "linux" or machine is None or sys.maxsize < 2**32:
        bits = 64 if sys.maxsize > 2**32 else 32
        raise UnsupportedPlatformError(
            f"{supported} to build for another machine than this one ({platform.system()} {platform.machine()}, "
            f"{bits}-bit Python)"
        )
    libc = "gnu.2.17" if platform.libc_ver()[0] == "glibc" else "musl"
    return f"{machine}-linux-{libc}"


def compile_library(root: Path, target: str, prefix: Path) -> list[Path]:
    """Compile the library for `target`.

    Args:
        root: The source tree.
        target: A key of `TARGETS`.
        prefix: Folder that Zig installs into; made when missing.

    Returns:
        Paths of the library, of its header and of the module made from that, below `prefix`.

    Raises:
        subprocess.CalledProcessError: Zig failed; it has printed why.
    """
    environment = os.environ.copy()
    environment.setdefault("ZIG_LOCAL_CACHE_DIR", str(root / ".zig-cache"))
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(root / ".zig-cache" / "global"))
    options = ["-Doptimize=ReleaseSafe", f"-Dtarget={target}", "-Dcpu=baseline", "--prefix", str(prefix)]
    command = [sys.executable, "-m", "ziglang", "build", *options, "--summary", "none"]
    subprocess.run(command, cwd=root, env=environment, check=True)
    header = prefix / "include" / HEADER
    return [prefix / "lib" / LIBRARY, header, declare(header, prefix / "include" / DECLARED)]


def declare(header: Path, module: Path) -> Path:
    """Write a module that has what cffi makes of a header: reading C is most of the time that loading takes.

    Args:
        header: With its part for cffi between two marks.
        module: Where to.

    Returns:
        The same.
    """
    raw = header.read_bytes()
    ffi = cffi.FFI()
    ffi.set_source("trimesh._native.declared", None)
    ffi.cdef(raw.decode().split("/* cdef-begin */", 1)[1].split("/* cdef-end */", 1)[0])
    ffi.emit_python_code(str(module))
    digest = hashlib.sha256(raw).hexdigest()
    module.write_text(f'# type: ignore\n{module.read_text()}\nHEADER_DIGEST = "{digest}"\n')
    return module


def install_into_source(root: Path, built: list[Path]) -> list[Path]:
    """Put what was built into the package, each file in one step: who has the old library mapped keeps it."""
    package = root / "src" / "trimesh" / "_native"
    package.mkdir(parents=True, exist_ok=True)
    installed = []
    for source in built:
        temporary = package / f".{source.name}.{os.getpid()}"
        shutil.copyfile(source, temporary)
        installed.append(temporary.replace(package / source.name))
    return installed


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to a wheel, or to the source tree for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling what to pack and how to tag it."""
        root = Path(self.root)
        target = zig_target()
        built = compile_library(root, target, root / "build" / target)
        if version == "editable":
            install_into_source(root, built)
        else:
            build_data["force_include"].update({str(path): f"trimesh/_native/{path.name}" for path in built})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{TARGETS[target]}"


def main() -> None:
    """Build for the development loop, with the `ziglang` of the running interpreter."""
    root = Path(__file__).resolve().parent
    target = zig_target()
    library, *_ = install_into_source(root, compile_library(root, target, root / "build" / target))
    print(f"built {library.relative_to(root)} for {target}")


if __name__ == "__main__":
    main()
