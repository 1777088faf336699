"""Every promise has a test, on every back end that it needs, and tests cite nothing that is none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from tests.conformance.behaviours import BEHAVIOURS, ELSEWHERE, REAL, SIM

TESTS = Path(__file__).parent
CITATION = re.compile(r"\b([A-Z]\d{1,2})\b")

LATER = {"N1", "N2", "N3"}
"""Rules of tensors that have no page in `BEHAVIOURS` yet, because there are none."""


@attrs.frozen
class Case:
    """One test function.

    Attributes:
        where: File and function.
        cited: The ids of its docstring.
        backends: Where CI runs it; none for a unit test.
    """

    where: str
    cited: frozenset[str]
    backends: frozenset[str]


def backends_of(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef, marks: str) -> frozenset[str]:
    """Tell from parameters and marks what a test runs on."""
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    own = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    if "simulate(" in own:
        return frozenset({SIM, REAL} if "both" in own or '"proc"' in own else {SIM})
    if "only_sim" in own:
        return frozenset({SIM})
    if "only_real" in own or "mark.real" in own + marks:
        return frozenset({REAL})
    if "backend" in parameters or path.match("conformance/test_transport*.py"):
        return frozenset({SIM, REAL})
    return frozenset({SIM} if path.parent.name == "conformance" else ())


def cases() -> Iterator[Case]:
    """Yield every test function but those that only `make stress` runs."""
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        assigned = (node for node in tree.body if isinstance(node, ast.Assign))
        marks = " ".join(ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark")
        for node in tree.body:
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and "mark.stress" not in marks:
                cited = frozenset(CITATION.findall(ast.get_docstring(node) or ""))
                where = f"{path.relative_to(TESTS)}::{node.name}"
                yield Case(where, cited, backends_of(path, node, marks))


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


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_behaviour_is_tested_where_it_must_be(behaviour: str, found: list[Case]) -> None:
    needed, _ = ELSEWHERE.get(behaviour, (frozenset({SIM, REAL}), ""))
    cited = [case for case in found if behaviour in case.cited]

    assert needed <= frozenset().union(*(case.backends for case in cited)), [case.where for case in cited]


@pytest.mark.parametrize("family", ["C", "E", "D", "Z"])
def test_family_is_tested_from_asyncio(family: str, found: list[Case]) -> None:
    """K04: not by single cases alone."""
    cited = set().union(*(case.cited for case in found if case.where.startswith("aio/")))

    assert len({one for one in cited if re.fullmatch(rf"{family}\d\d", one)}) >= min(5, len(members(family)))


def members(family: str) -> list[str]:
    return [one for one in BEHAVIOURS if re.fullmatch(rf"{family}\d\d", one)]


def test_tests_cite_nothing_else(found: list[Case]) -> None:
    unknown = {(case.where, one) for case in found for one in case.cited - BEHAVIOURS.keys() - LATER}

    assert unknown == set()
