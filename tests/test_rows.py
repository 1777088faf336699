"""A table runs all its rows inside one item and names those that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from tests.rows import rows

SUITE = """
import time
import pytest
import trio
from tests.rows import rows

@rows("number, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
def test_several(number, word):
    assert number % 2, f"{word} is even"

@rows("word", ["2", "x", "3"])
@rows("base", (10, 16))
async def test_one_of_a_product(word, base, tmp_path):
    await trio.lowlevel.checkpoint()
    with pytest.raises(ValueError):
        int(word + "f" * (base == 10), base)

@pytest.mark.timeout(2)
@rows("seconds", [0, 60, 70])
def test_slow(seconds):
    time.sleep(seconds)
"""


@pytest.mark.real
def test_report_of_pytest_names_each_row(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_trio.plugin", "-p", "pytest_timeout"]
    command += [
        "-p",
        "no:cacheprovider",
        "-o",
        "trio_mode=true",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    printed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False).stdout

    several, _, rest = printed.partition("test_one_of_a_product")
    product, _, slow = rest.partition("test_slow")
    assert "3 failed" in slow, printed
    assert "two is even" in several, printed
    assert "in row 1: number=2, word='two'" in several, printed
    assert "four is even" in several, printed
    assert "in row 3: number=4, word='four'" in several, printed
    assert "2 rows failed" in several, printed
    assert "in row 0: word='2'" in product, printed
    assert "in row 1: base=16" in product, printed
    assert "from pytest-timeout" in slow, printed
    assert "in row 1: seconds=60" in slow, printed
    assert "row 2: seconds" not in slow, printed


def test_all_rows_run_whatever_fails() -> None:
    ran: list[int] = []

    @rows("number", range(4))
    def table(number: int) -> None:
        ran.append(number)
        if number == 1:
            pytest.fail("one")
        assert number != 2

    with pytest.raises(BaseExceptionGroup, match="2 rows failed") as caught:
        table()

    assert ran == [0, 1, 2, 3]
    assert [error.__notes__ for error in caught.value.exceptions] == [["in row 1: number=1"], ["in row 2: number=2"]]


def test_interrupt_ends_the_table() -> None:
    ran: list[int] = []

    @rows(("number", "name"), [(1, "a"), (2, "b")])
    async def table(number: int, name: str) -> None:
        ran.append(number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        trio.run(table)

    assert ran == [1]
    assert caught.value.__notes__ == ["in row 0: number=1, name='a'"]


def test_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="has a table without rows"):
        rows("number", [])(lambda number: None)


def test_argument_that_the_test_lacks_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not take all of"):
        rows("number", [1])(lambda word: None)
