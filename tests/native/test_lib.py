"""Finding and checking the native library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS

from trimesh._native import lib as lib_module
from trimesh._native import status
from trimesh._native.lib import Library, NativeLibraryError, load


def header_of(library: Library) -> Path:
    return library.path.with_name("trimesh.h")


def test_load_returns_one_library_with_its_contract():
    library = load()

    assert load() is library
    assert library.lib.tm_abi_version() == lib_module.ABI_VERSION


def test_load_says_how_to_build_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRIMESH_NATIVE_LIB", str(tmp_path / "none.so"))

    with pytest.raises(NativeLibraryError, match="ziglang build dev"):
        load.__wrapped__()


def test_load_refuses_a_library_that_is_not_ours(monkeypatch: pytest.MonkeyPatch):
    foreign = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    monkeypatch.setenv("TRIMESH_NATIVE_LIB", foreign)

    with pytest.raises(NativeLibraryError, match="cannot be loaded"):
        load.__wrapped__()


def test_load_refuses_another_version_of_the_contract(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lib_module, "ABI_VERSION", 999)

    with pytest.raises(NativeLibraryError, match=r"contract version \d+, these Python files need 999"):
        load.__wrapped__()


def test_load_refuses_a_header_without_a_contract(tmp_path: Path):
    broken = tmp_path / "trimesh.h"
    broken.write_text("int x;")

    with pytest.raises(NativeLibraryError, match="cannot be read"):
        Library(load().path, broken)


def test_statuses_are_those_of_the_header():
    """The Python names repeat the header's; both are append-only."""
    known = {name: value for name, value in vars(status).items() if name.isupper() and isinstance(value, int)}
    assert known == {name: getattr(load().lib, f"TM_{name}") for name in known}


def test_import_of_the_transport_does_not_load_the_library():
    code = "import trimesh._transport.native; print('libtrimesh' in open('/proc/self/maps').read())"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )

    assert done.stdout.strip() == "False"


def test_loading_starts_no_thread_and_opens_nothing():
    """A spawner loads the library before it forks."""
    code = (
        "import os, trimesh._native.lib as lib\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "lib.load()\n"
        "print(len(os.listdir('/proc/self/fd')) - before, len(os.listdir('/proc/self/task')))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )

    assert done.stdout.split() == ["0", "1"]
