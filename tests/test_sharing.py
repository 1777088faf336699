"""A fixture of a module is made by one worker, however many there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

@pytest.fixture(scope="module")
def costly():
    with open("made", "a") as file:
        file.write("once\\n")

@pytest.mark.parametrize("number", range(8))
def test_that_shares(costly, number):
    pass
"""

ALONE = """
import os
import pytest

@pytest.mark.parametrize("number", range(8))
def test_that_goes_anywhere(number):
    with open("ran", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


@pytest.mark.real
def test_one_worker_makes_the_fixture_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_alone.py").write_text(ALONE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "tests.sharing"]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    path = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )

    assert "16 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "made").read_text() == "once\n"
    assert len((tmp_path / "ran").read_text().splitlines()) == 8
