"""Bugs that are planted in the native code of sessions are found (`python -m tests.relay.native_bugs`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.relay.native_bugs import BUGS, is_found, passes_without
from tests.rows import rows

from trimesh._native import tls

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])


@rows("name", BUGS)
def test_what_a_bug_changes_stands_there_once(name: str) -> None:
    """So that each can be planted, whatever else has changed."""
    assert BUGS[name].right in BUGS[name].source()


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_bug_planted_in_native_code_is_found(name: str, tmp_path: Path) -> None:
    """H3, H5, H7."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder in (right, wrong):
        folder.mkdir()
    assert passes_without(BUGS[name], right)
    assert is_found(BUGS[name], wrong)
