"""Finding and checking the native library."""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

from trimesh._native import lib
from trimesh._native import lib as lib_module
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


def test_what_the_build_declares_is_what_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build = pytest.importorskip("hatch_build", reason="hatchling is missing", exc_type=ImportError)
    header = header_of(load())
    monkeypatch.syspath_prepend(str(build.declare(header, tmp_path / "declared_anew.py").parent))
    monkeypatch.setattr(lib_module, "_declared", lambda _: None)
    read = lib_module.read_contract(header)
    made: Any = importlib.import_module("declared_anew")

    assert hashlib.sha256(header.read_bytes()).hexdigest() == made.HEADER_DIGEST
    names = [set(dir(ffi.dlopen(str(load().path)))) for ffi in (read, made.ffi)]
    assert names[0] == names[1]
    assert [sorted(kinds) for kinds in read.list_types()] == [sorted(kinds) for kinds in made.ffi.list_types()]
    layouts = [[_layout(ffi, name) for name in read.list_types()[0]] for ffi in (read, made.ffi)]
    assert layouts[0] == layouts[1]
    assert any(layouts[0])


def _layout(ffi: Any, name: str) -> list[tuple[str, int, str, int]]:
    kind = ffi.typeof(name)
    opaque = {"tm_bus", "tm_mover", "tm_tls", "tm_tls_session", "tm_relay"}  # only the library knows what is in those
    if kind.kind != "struct" or name in opaque:
        return []
    return [(field, found.offset, found.type.cname, ffi.sizeof(kind)) for field, found in kind.fields]


def test_a_header_that_the_build_has_not_seen_is_read(tmp_path: Path):
    changed = tmp_path / "trimesh.h"
    changed.write_text(header_of(load()).read_text().replace("/* cdef-end */", "#define TM_NEW 77\n/* cdef-end */"))

    assert Library(load().path, changed).lib.TM_NEW == 77


def test_statuses_are_those_of_the_header():
    """The Python names repeat the header's; both are append-only."""
    known = {name: value for name, value in vars(lib).items() if re.match("OK|FULL|UNDER_WAY|ERR_", name)}
    assert known == {name: getattr(load().lib, f"TM_{name}") for name in known}


def test_import_of_the_transport_does_not_load_the_library():
    code = "import trimesh._transport.native.transport; print('libtrimesh' in open('/proc/self/maps').read())"

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
