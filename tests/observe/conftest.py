"""Runs of this user that are looked at from outside, in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS

from trimesh import limits


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of this test, which is made by the first run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "trimesh"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops and processes may take their time to answer: they do run, however busy the machine is."""
    for name in ("OBSERVE_LOOP_SECONDS", "OBSERVE_SECONDS", "CONTROL_SECONDS"):
        monkeypatch.setattr(limits, name, HANG_SECONDS)
