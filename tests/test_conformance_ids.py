"""Every rule of docs/SEMANTICS.md has a test, on every back end that it needs, and tests cite nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from tests.rows import rows
from tests.tiers import REAL_BACKENDS, Marks, is_daily, marks_in

TESTS = Path(__file__).parent
CITATION = re.compile(r"\b([A-Z]\d{1,2})\b")

PAGE = TESTS.parent / "docs" / "SEMANTICS.md"
RULE = re.compile(r"^- (?:\*\*([A-Z]\d\d)\*\*|<a id=\"([A-Z]\d\d?)\"></a>\*\*\2\*\*)", re.MULTILINE)
"""A promise and a rule are items of a list, a rule with an anchor of its name."""

RULES = [promise or rule for promise, rule in RULE.findall(PAGE.read_text())]

SIM, REAL = "sim", "real"

ELSEWHERE: dict[str, tuple[frozenset[str], str]] = {
    "C13": (frozenset({REAL}), "no simulated process has C code"),
    "C14": (frozenset({REAL}), "in simulation a threaded endpoint runs inline"),
    "D02": (frozenset({REAL}), "clocks of processes; simulated ones have theirs besides"),
    "E12": (frozenset({REAL}), "bytes of a link"),
    "H19": (frozenset({REAL}), "a terminal of a process"),
    "K04": (frozenset({REAL}), "asyncio has no virtual clock"),
    "K05": (frozenset({REAL}), "the same"),
    "K06": (frozenset({REAL}), "threads have no virtual clock"),
    "N1": (frozenset({SIM}), "it is decided in the process that issues, whatever the ranks are"),
    "N3": (frozenset({REAL}), "simulated ranks have no collectives"),
    "N5": (frozenset({REAL}), "no simulated process has a device"),
    "Q3": (frozenset({REAL}), "a socket of a process"),
    "Q4": (frozenset({REAL}), "a thread of a process"),
    "Q5": (frozenset({REAL}), "requests at a socket"),
    "Q6": (frozenset({REAL}), "files of processes"),
    "Q7": (frozenset({REAL}), "the same"),
    "Q8": (frozenset({REAL}), "the same"),
    "Q10": (frozenset({REAL}), "the same"),
    "Q11": (frozenset({REAL}), "a terminal of a person"),
    "Q12": (frozenset({REAL}), "simulations export nothing"),
    "Q15": (frozenset({REAL}), "files of processes"),
    "Q17": (frozenset({REAL}), "flight records of processes"),
    "Q18": (frozenset({REAL}), "a command of a shell"),
    "Q19": (frozenset({REAL}), "commands of a shell"),
    "Q20": (frozenset({REAL}), "a notebook is a program of its own"),
    "Q21": (frozenset({REAL}), "the same"),
    "Q9": (frozenset({REAL}), "simulations show nothing"),
    "S1": (frozenset({SIM}), "it is about simulation"),
    "Y21": (frozenset({SIM}), "about time, which is virtual there"),
    **{f"Z{number:02}": (frozenset({REAL}), "about the operating system") for number in range(1, 16)},
    **{f"H{number}": (frozenset({REAL}), "about hosts, each with its agent") for number in (1, 2, 3, 4, 5, 6, 7, 9)},
    **{f"H{number}": (frozenset({REAL}), "the same") for number in (11, 12, 13, 15, 16, 17, 23, 25, 26, 30, 31)},
    **{f"W{number}": (frozenset({REAL}), "about programs, each with processes of its own") for number in range(1, 6)},
    **{f"O{number}": (frozenset({REAL}), "about the operating system") for number in range(1, 9)},
}
"""Where an id must be cited if not on both back ends, and why."""


@attrs.frozen
class Case:
    """One test function.

    Attributes:
        where: File and function.
        cited: The ids of its docstring.
        backends: Where CI runs it; none for a unit test.
        daily: Those of them that `make test` runs it on.
    """

    where: str
    cited: frozenset[str]
    backends: frozenset[str]
    daily: frozenset[str]


def backends_of(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef, marks: str) -> frozenset[str]:
    """Tell from parameters and marks what a test runs on."""
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    own = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    if "simulate(" in own:
        return frozenset({SIM, REAL} if "both" in own.lower() or "'proc'" in own else {SIM})  # as `unparse` quotes
    if "only_sim" in own:
        return frozenset({SIM})
    if "only_real" in own or "mark.real" in own + marks:
        return frozenset({REAL})
    if "backend" in parameters or path.match("conformance/test_transport*.py"):
        return frozenset({SIM, REAL})
    return frozenset({SIM} if path.parent.name == "conformance" else ())


def daily_of(backends: frozenset[str], marks: Marks) -> frozenset[str]:
    """Return where a test runs daily."""
    names = {SIM: ("sim",), REAL: tuple(REAL_BACKENDS)}
    return frozenset(one for one in backends if any(is_daily(marks, name) for name in names[one]))


def cases() -> Iterator[Case]:
    """Yield every test function but those that only `make stress` runs."""
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        assigned = (node for node in tree.body if isinstance(node, ast.Assign))
        of_module = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
        marks = " ".join(map(ast.unparse, of_module))
        for node in tree.body:
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and "mark.stress" not in marks:
                cited = frozenset(CITATION.findall(ast.get_docstring(node) or ""))
                where = f"{path.relative_to(TESTS)}::{node.name}"
                backends = backends_of(path, node, marks)
                daily = daily_of(backends, marks_in(*of_module, *node.decorator_list))
                yield Case(where, cited, backends, daily)


@pytest.fixture(scope="module")
def found() -> list[Case]:
    return list(cases())


def test_all_tests_are_seen(found: list[Case]) -> None:
    """The scan of this file knows the forms that tests have: else it proves nothing."""
    assert len(found) > 1000
    by_name = {case.where.partition("::")[2]: case.backends for case in found}
    assert by_name["test_cancel_ends_every_rank"] == {SIM, REAL}
    assert by_name["test_cancel_waits_for_every_acknowledgement"] == {SIM}
    assert by_name["test_threaded_endpoint_sees_the_cancel"] == {REAL}
    assert by_name["test_process_death_is_diagnosed"] == {REAL}
    assert by_name["test_all_tests_are_seen"] == frozenset()


def test_page_is_understood() -> None:
    """Each id that the page defines is one, once; what it speaks of by an id is there."""
    assert len(RULES) == len(set(RULES)) > 100
    assert {"C01", "Z15", "M1", "N5", "S1"} <= set(RULES)
    assert set(re.findall(r"\(#([A-Z]\d\d?)\)", PAGE.read_text())) <= set(RULES)
    assert ELSEWHERE.keys() <= set(RULES)


@rows("behaviour", RULES)
def test_behaviour_is_tested_where_it_must_be(behaviour: str, found: list[Case]) -> None:
    needed, _ = ELSEWHERE.get(behaviour, (frozenset({SIM, REAL}), ""))
    cited = [case for case in found if behaviour in case.cited]

    assert needed <= frozenset().union(*(case.backends for case in cited)), [case.where for case in cited]


@rows("behaviour", RULES)
def test_behaviour_is_tested_daily(behaviour: str, found: list[Case]) -> None:
    """Once: in simulation, or over real processes if it is about the operating system."""
    needed, _ = ELSEWHERE.get(behaviour, (frozenset({SIM, REAL}), ""))
    cited = [case for case in found if behaviour in case.cited]

    assert any(case.daily & needed for case in cited), [case.where for case in cited]


@pytest.mark.parametrize("family", ["C", "E", "D", "Z"])
def test_family_is_tested_from_asyncio(family: str, found: list[Case]) -> None:
    """K04: not by single cases alone."""
    cited = set().union(*(case.cited for case in found if case.where.startswith("aio/")))

    assert len({one for one in cited if re.fullmatch(rf"{family}\d\d", one)}) >= min(5, len(members(family)))


def members(family: str) -> list[str]:
    return [one for one in RULES if re.fullmatch(rf"{family}\d\d", one)]


def test_tests_cite_nothing_else(found: list[Case]) -> None:
    unknown = {(case.where, one) for case in found for one in case.cited - set(RULES)}

    assert unknown == set()


if __name__ == "__main__":  # which test shows each rule daily
    every = list(cases())
    for rule in RULES:
        shown = [case for case in every if rule in case.cited and case.daily & ELSEWHERE.get(rule, (case.daily,))[0]]
        print(f"{rule:4} {len(shown):3}  {shown[0].where if shown else '-'}")
