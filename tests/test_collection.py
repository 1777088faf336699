"""Workers share what is to be compiled before they collect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir
from tests import collection


def test_shares_of_the_workers_are_all_modules_as_pytest_reads_them(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(collection, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(pytestconfig, "args", [str(tmp_path / "tests")])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    names = ["tests/test_one.py", "tests/room/test_two.py", "package/three.py", "package/room/four.py"]
    for name in [*names, "tests/no_test.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def check(one):\n    assert one == 2\n")

    def compiled() -> list[str]:
        kept = {name: get_cache_dir(tmp_path / name) / (Path(name).stem + PYC_TAIL) for name in names}
        return [name for name, path in kept.items() if _read_pyc(tmp_path / name, path) is not None]

    collection.compile_share(pytestconfig, 0, 2)
    first = compiled()
    assert len(first) == 2
    collection.compile_share(pytestconfig, 1, 2)
    assert compiled() == names
    assert len(list(tmp_path.rglob("*.pyc"))) == 4
