"""What is changed by machine, how it is planted, and that a change which no test finds is shown."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.mutation.explained import read_explained
from tests.mutation.mutants import mutants_of
from tests.mutation.planting import Functions
from tests.mutation.table import table_of

SOURCE = '''
LIMIT = 3

def room(taken, extra):
    """Return how much is left."""
    if taken < 5 and extra:
        taken = taken + 1
    return LIMIT - taken
'''

NESTED = """
class Box:
    def adder(self, start):
        def add(number):
            return start + number
        return add

    @property
    def size(self):
        return 7
"""


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


def test_mutant_names_the_innermost_function() -> None:
    where = {mutant.text: mutant.where for mutant in mutants_of(NESTED)}
    assert where["start + number: Sub"] == "Box.adder.add"
    assert where["return add: None"] == "Box.adder"
    assert where["7: 8"] == "Box.size"


def test_assertions_are_left_alone() -> None:
    source = "def pairs(a, b):\n    assert len(a) == 2\n    return list(zip(a, b, strict=True))\n"
    assert [mutant.text for mutant in mutants_of(source)] == ["return list(zip(a, b, strict=True)): None"]


def test_planted_code_is_that_of_functions_which_are_there(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    path = str(tmp_path / "box.py")
    exec(compile(NESTED, path, "exec"), names)
    box = names["Box"]()
    before = box.adder(5)
    functions = Functions(path)
    [added] = [mutant for mutant in mutants_of(NESTED) if mutant.text == "start + number: Sub"]
    [size] = [mutant for mutant in mutants_of(NESTED) if mutant.text == "7: 8"]

    functions.plant(size.source)
    assert (box.size, box.adder(5)(2), before(2)) == (8, 7, 7)
    functions.plant(added.source)
    assert (box.size, box.adder(5)(2), before(2)) == (7, 3, 3)


def test_explained_do_not_count_and_samples_have_an_error() -> None:
    all_tried = Counter({"found": 8, "survived": 1, "not executed": 1, "explained": 2, "at import": 3})
    lines = list(table_of({"a/x.py": all_tried, "a/y.py": Counter({"found": 10})}, {"a/x.py": 15, "a/y.py": 100}))
    assert lines[1].endswith(" 80.0 %")
    assert lines[2].endswith(" 100.0 % +- 12.9")
    assert lines[3].startswith("= a ")
    assert " 90.0 % +-" in lines[3]


def test_what_is_explained_is_still_there() -> None:
    of_file: dict[str, set[tuple[str, str]]] = {}
    for path, where, text in read_explained():
        if path not in of_file:
            of_file[path] = {(one.where, one.text) for one in mutants_of(Path(path).read_text(encoding="utf-8"))}
        assert (where, text) in of_file[path], f"{path} has no such mutant: take it out of the list"


@pytest.mark.stress
def test_share_of_what_was_found_is_said() -> None:
    """Over a file of this project: mutants are in processes of their own, and the file stays as it is."""
    path = Path("src/trimesh/_routing/collector.py")
    before = path.read_bytes()
    tests = "tests/routing"
    command = [sys.executable, "-m", "tests.mutation.run", str(path), "--tests", tests, "--sample", "8"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout
    [line] = [line for line in said.splitlines() if line.startswith("= src/trimesh/_routing")]
    assert int(line.split()[3]) == 8
    assert int(line.split()[4]) >= 6
    assert path.read_bytes() == before
