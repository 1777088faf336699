"""Environments of a host: whole or made anew, locked, and removed when nothing has used them for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimesh.jobs.packages import Environment, prune


def made(folder: Path, name: str) -> Environment:
    one = Environment(folder, name)
    assert one.lock_alone()
    (one.place / "bin").mkdir(parents=True)
    one.finish(("/x",))
    return one


def test_environment_is_used_once_it_is_whole(tmp_path: Path) -> None:
    """EP-1"""
    one = Environment(tmp_path, "a")
    assert one.lock_alone()
    (one.place / "bin").mkdir(parents=True)
    assert one.paths is None
    other = Environment(tmp_path, "a")
    assert not other.lock_shared()
    one.finish(("/x", "/y"))
    assert one.lock_shared()
    assert other.lock_shared()
    assert other.paths == ("/x", "/y")
    assert not other.lock_alone(), "the first one uses it"
    one.close()
    assert other.lock_alone()
    other.close()


def test_unused_environments_go_and_used_ones_stay(tmp_path: Path) -> None:
    """EP-3"""
    kept, old, used = (made(tmp_path, name) for name in ("kept", "old", "used"))
    for one in (old, used):
        os.utime(one.place / "whole", (1000.0, 1000.0))
    assert used.lock_shared()
    kept.close()
    old.close()
    half = Environment(tmp_path, "half")
    assert half.lock_alone()
    half.place.mkdir()
    half.close()
    (tmp_path / "removed.lock").touch()
    prune(tmp_path, 3600.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.lock", "used", "used.lock"]
    used.touch()
    used.close()
    prune(tmp_path, 3600.0)
    assert used.place.exists()


def test_environment_is_kept_for_as_long_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EP-3"""
    monkeypatch.setattr("time.time", lambda: 5000.0)
    for name, used in (("kept", 2000.0), ("old", 1999.0)):
        one = made(tmp_path, name)
        os.utime(one.place / "whole", (used, used))
        one.close()
    prune(tmp_path, 3000.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.lock"]


def test_lock_of_an_environment_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    """EP-3: who waits for it makes it anew, and excludes those who come later."""
    first = made(tmp_path, "a")
    late = Environment(tmp_path, "a")
    assert not late.lock_alone()
    os.utime(first.place / "whole", (1000.0, 1000.0))
    first.close()
    prune(tmp_path, 3600.0)
    assert late.lock_alone()
    later = Environment(tmp_path, "a")
    assert not later.lock_shared()
    later.close()
    late.close()
