"""What is changed by machine, how it is planted, and that a change which no test finds is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.mutation.explained import read_explained
from tests.mutation.lines import Lines
from tests.mutation.mutants import mutants_of
from tests.mutation.planting import Functions
from tests.mutation.rooms import BOTH_TIERS, NEAREST, files_of, nearest, tier_of
from tests.mutation.run import drawn
from tests.mutation.table import table_of
from tests.spawner_template import ForkedTemplate

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
        (6, "taken < 5 and extra: not asked: taken < 5"),
        (6, "taken < 5 and extra: not asked: extra"),
        (6, "not (taken < 5 and extra)"),
        (7, "taken + 1: Sub"),
        (7, "1: 2"),
        (7, "without taken = taken + 1"),
        (8, "LIMIT - taken: Add"),
        (8, "return LIMIT - taken: None"),
    }
    assert len({mutant.source for mutant in mutants}) == len(mutants) == 11


def test_any_and_min_are_all_and_max() -> None:
    source = "def least(found):\n    return any(found) and min(found)\n"
    texts = {mutant.text for mutant in mutants_of(source)}
    assert {"any(found): all", "min(found): max"} < texts


def test_mutant_names_the_innermost_function() -> None:
    where = {mutant.text: mutant.where for mutant in mutants_of(NESTED)}
    assert where["start + number: Sub"] == "Box.adder.add"
    assert where["return add: None"] == "Box.adder"
    assert where["7: 8"] == "Box.size"


def test_assertions_are_left_alone() -> None:
    source = "def pairs(a, b):\n    assert len(a) == 2\n    return list(zip(a, b, strict=True))\n"
    assert [mutant.text for mutant in mutants_of(source)] == ["return list(zip(a, b, strict=True)): None"]


def test_texts_for_people_annotations_and_names_that_are_dropped_are_left_alone() -> None:
    source = """
def told(log, count):
    "Return 3."
    many: int | None = count
    log.warning("more than %d", 2)
    self.log.info("so")
    __tracebackhide__ = True
    del many
    return f"{count + 1} {'s' if count > 1 else ''}"

class Box:
    def __repr__(self):
        return "<box>" if self.size > 0 else "<empty>"
"""
    assert [mutant.text.partition(" ")[0] for mutant in mutants_of(source)] == ["return"]


def test_each_room_and_each_pattern_of_its_tests_is_there() -> None:
    for room, patterns in NEAREST.items():
        assert files_of(room), room
        assert all(list(Path().glob(pattern)) for pattern in patterns), room


def test_nearest_tests_are_those_of_the_innermost_room() -> None:
    assert nearest("src/trimesh/service/pool/engine.py") == nearest("src/trimesh/service") == ["tests/service"]
    assert nearest("src/trimesh/service/slots.py") == ["tests/data", "tests/service"]
    assert nearest("src/trimesh/_routing/collector.py") == ["tests/routing"]
    assert {tier_of(one) for one in (*BOTH_TIERS, "src/trimesh/aio/body.py")} == {"all"}
    assert tier_of("src/trimesh") == "daily"
    with pytest.raises(SystemExit, match="name them by --tests"):
        nearest("src/trimesh/limits.py")


def test_sample_of_a_room_follows_from_its_seed() -> None:
    first, again, other = (drawn("src/trimesh/config", 5, seed) for seed in (1, 1, 2))
    assert [(name, it.line, it.text) for name, it in first] == [(name, it.line, it.text) for name, it in again]
    assert [it.line for _, it in first] != [it.line for _, it in other]


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


def test_lines_of_threads_and_of_forks_are_counted(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("box.py", "room.py", "other.py")]
    for path, source in zip(paths, (NESTED, SOURCE, SOURCE), strict=True):
        Path(path).write_text(source, encoding="utf-8")
    box: dict[str, Any] = {}
    room: dict[str, Any] = {}
    lines = Lines(paths)
    exec(compile(NESTED, paths[0], "exec"), box)
    exec(compile(SOURCE, paths[1], "exec"), room)
    lines.start()
    try:
        thread = threading.Thread(target=room["room"], args=(5, True))
        thread.start()
        thread.join()
        assert lines.take() == {paths[0]: [], paths[1]: [6, 8], paths[2]: []}
        pid = os.fork()
        if pid == 0:
            box["Box"]().adder(5)(2)
            room["room"](1, True)
            os._exit(0)
        os.waitpid(pid, 0)
    finally:
        lines.stop()
    room["room"](5, True)
    assert lines.take() == {paths[0]: [4, 5, 6], paths[1]: [6, 7, 8], paths[2]: []}


def test_explained_do_not_count_and_samples_have_an_error() -> None:
    all_tried = Counter({"found": 8, "survived": 1, "not executed": 1, "explained": 2, "at import": 3})
    rooms = {"a": all_tried, "b/y.py": Counter({"found": 10})}
    lines = list(table_of(rooms, {"a": 15, "b/y.py": 100}, {"a": 61.4, "b/y.py": 2.0}))
    assert lines[1].endswith(" 80.0 %  61 s")
    assert lines[2].endswith(" 100.0 % +- 12.9  2 s")


def test_what_is_explained_is_still_there() -> None:
    of_file: dict[str, set[tuple[str, str]]] = {}
    for path, where, text in read_explained():
        if path not in of_file:
            of_file[path] = {(one.where, one.text) for one in mutants_of(Path(path).read_text(encoding="utf-8"))}
        assert (where, text) in of_file[path], f"{path} has no such mutant: take it out of the list"


@pytest.mark.real
def test_templates_that_are_forks_end_in_any_order() -> None:
    """A later one has what the earlier ones had: the learning of lines waited for the first until its time was up."""
    first, second = ForkedTemplate(), ForkedTemplate()
    first.close()
    second.close()


@pytest.mark.stress
def test_share_of_what_was_found_is_said() -> None:
    """Over a file of this project: mutants are in processes of their own, and the file stays as it is."""
    path = Path("src/trimesh/_routing/collector.py")
    before = path.read_bytes()
    tests = "tests/routing"
    command = [sys.executable, "-m", "tests.mutation.run", str(path), "--tests", tests, "--sample", "8"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout
    [line] = [line for line in said.splitlines() if line.startswith(f"{path} ")]
    assert int(line.split()[2]) == 8
    assert int(line.split()[3]) >= 6
    assert path.read_bytes() == before
