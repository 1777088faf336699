"""The UCX that comes as a Python package."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from trimesh._transport.native.mover import wheel_library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an installed package `libucx`, which must not be imported."""
    monkeypatch.delitem(sys.modules, "libucx", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "libucx"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    importlib.invalidate_caches()
    return package


def test_library_of_the_package_is_found(folder: Path):
    (folder / "lib" / "libucp.so.0").touch()
    assert wheel_library() == folder / "lib" / "libucp.so.0"


def test_package_without_a_library_has_none(folder: Path):
    assert wheel_library() is None


def test_module_made_by_hand_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "libucx", types.ModuleType("libucx"))
    assert wheel_library() is None
