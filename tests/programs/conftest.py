"""Two programs: this one, and one that publishes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import PROGRAMS, Program

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of names of this test; and the scripts' modules, for it and for them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("TRIMESH_TEST_STAGE", "/dev/null")
    yield tmp_path / "trimesh"
    for name in ("judges", "stage"):
        sys.modules.pop(name, None)


@pytest.fixture
def judge(folder: Path) -> Any:
    """The class of the actors, as the scripts have it."""
    import judges

    return judges.Judge


@pytest.fixture
def publisher(folder: Path, tmp_path: Path) -> Iterator[Program]:
    """A program that publishes two judges."""
    with Program(tmp_path, "publisher", programs=SCRIPTS) as program:
        program.event("published")
        yield program


def names_in(folder: Path) -> list[str]:
    """Return what is in the folder of names, without the folder of control sockets."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
