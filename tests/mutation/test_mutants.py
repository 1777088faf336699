"""What is changed by machine, and that a change which no test finds is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutation.mutants import mutants_of

SOURCE = '''
LIMIT = 3

def room(taken, extra):
    """Return how much is left."""
    if taken < 5 and extra:
        taken = taken + 1
    return LIMIT - taken
'''


def test_each_mutant_is_one_change() -> None:
    mutants = list(mutants_of(SOURCE))
    assert {(mutant.line, mutant.text) for mutant in mutants} == {
        (6, "taken < 5: LtE"),
        (6, "5: 6"),
        (6, "taken < 5 and extra: Or"),
        (6, "not (taken < 5 and extra)"),
        (7, "taken + 1: Sub"),
        (7, "1: 2"),
        (7, "without taken = taken + 1"),
        (8, "LIMIT - taken: Add"),
        (8, "return LIMIT - taken: None"),
    }
    assert len({mutant.source for mutant in mutants}) == len(mutants) == 9


@pytest.mark.stress
def test_share_of_what_was_found_is_said() -> None:
    """Over a file of this project: mutants are in processes of their own, and the file stays as it is."""
    path = Path("src/trimesh/_routing/collector.py")
    before = path.read_bytes()
    tests = "tests/routing/test_collector.py"
    command = [sys.executable, "-m", "tests.mutation.run", str(path), "--tests", tests, "--sample", "3"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout
    assert "3 of 3 mutants found" in said or "2 of 3 mutants found" in said
    assert path.read_bytes() == before
