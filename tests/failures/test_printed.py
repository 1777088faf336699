"""What failing programs print is short, names the error at its end, and is what `printed/` has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.failures.failing import PRINTED, programs, run, run_copy
from tests.program_template import Run

pytestmark = pytest.mark.real

RECORDED_ON = (3, 11)
"""Python that `printed/` was written with; others word some lines in another way."""


DAILY = {"one/call_one", "many/init_on_8", "nest/endpoint_raises", "death/killed", "interrupt/nest", "one/asyncio_call"}
COPIED = {"one", "many", "nest", "death", "mistake"}
"""Kinds of programs of which most run in copies of one interpreter; the others need signals, or are about imports,
stacks and sizes of a process of their own."""
ALONE = {
    *DAILY,
    "death/segfault",
    *(f"mistake/{name}" for name in ("argument_missing", "arguments_too_many", "extra_cli", "extra_torch")),
    *(f"mistake/{name}" for name in ("hanging_init", "init_arguments", "time_sleep")),
}


def cases() -> Iterator[Any]:
    """Yield a case for each program."""
    for program in programs():
        name = f"{program.parent.name}/{program.stem}"
        marks = [pytest.mark.daily] if name in DAILY else []
        yield pytest.param(program, id=name, marks=[pytest.mark.torch, *marks] if "tensor" in name else marks)


@pytest.mark.parametrize("program", list(cases()))
def test_failure_reads(program: Path, run_program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if program.parent.name == "notebook":
        pytest.importorskip("IPython", reason="IPython is not installed")

    monkeypatch.setenv("NO_COLOR", "1")
    kind = program.parent.name
    is_copied = kind in COPIED and f"{kind}/{program.stem}" not in ALONE
    failure = run_copy(program, run_program) if is_copied else run(program)

    assert failure.complaints == [], f"{'; '.join(failure.complaints)}\n{failure.text}"
    if sys.version_info[:2] == RECORDED_ON:
        recorded = (PRINTED / program.parent.name / f"{program.stem}.txt").read_text()
        assert failure.text == recorded, "write it anew by `python -m tests.failures.failing --write` if it is right"


def test_every_text_has_its_program() -> None:
    recorded = {path.relative_to(PRINTED).with_suffix("") for path in PRINTED.glob("*/*.txt")}

    assert recorded == {Path(path.parent.name) / path.stem for path in programs()}
