"""What failing programs print is short, names the error at its end, and is what `printed/` has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.failures.failing import PRINTED, programs, run

pytestmark = pytest.mark.real

RECORDED_ON = (3, 11)
"""Python that `printed/` was written with; others word some lines in another way."""


@pytest.mark.parametrize("program", programs(), ids=lambda program: f"{program.parent.name}/{program.stem}")
def test_failure_reads(program: Path) -> None:
    if program.parent.name == "notebook":
        pytest.importorskip("IPython", reason="IPython is not installed")

    failure = run(program)

    assert failure.complaints == [], f"{'; '.join(failure.complaints)}\n{failure.text}"
    if sys.version_info[:2] == RECORDED_ON:
        recorded = (PRINTED / program.parent.name / f"{program.stem}.txt").read_text()
        assert failure.text == recorded, "write it anew by `python -m tests.failures.failing --write` if it is right"


def test_every_text_has_its_program() -> None:
    recorded = {path.relative_to(PRINTED).with_suffix("") for path in PRINTED.glob("*/*.txt")}

    assert recorded == {Path(path.parent.name) / path.stem for path in programs()}
