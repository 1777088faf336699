"""Output below the cell of a notebook of marimo, by a stand-in for that package."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh.observe.cell_output import MarimoOutput, open_cell_output


class Shown:
    """The output of a cell, which can be held up."""

    def __init__(self) -> None:
        self.texts = list[str]()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def replace(self, html: str) -> None:
        self.begun.set()
        assert self.may_go_on.wait(HANG_SECONDS)
        self.texts.append(html)


def marimo(shown: Shown, *, is_notebook: bool = True) -> Any:
    return SimpleNamespace(Thread=threading.Thread, Html=str, output=shown, running_in_notebook=lambda: is_notebook)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "trimesh cell output"]


def test_newest_output_is_shown_and_the_last_one_stays() -> None:
    """OC-1: what came meanwhile is left out; `close` waits for the last one."""
    shown = Shown()
    output = MarimoOutput(marimo(shown))
    output.show("first")
    assert shown.begun.wait(HANG_SECONDS)
    for number in range(3):
        output.show(f"page {number}")
    shown.may_go_on.set()
    output.close()
    assert shown.texts == ["first", "page 2"]
    assert threads() == []
    MarimoOutput(marimo(shown)).close()  # without any output there is no thread


def test_output_that_marimo_holds_up_does_not_hold_up_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """OC-1."""
    monkeypatch.setattr(limits, "LIVE_LAST_SECONDS", 0.0)
    shown = Shown()
    output = MarimoOutput(marimo(shown))
    output.show("only")
    assert shown.begun.wait(HANG_SECONDS)
    output.close()
    assert threads() == ["trimesh cell output"]
    [thread] = [one for one in threading.enumerate() if one.name == "trimesh cell output"]
    shown.may_go_on.set()
    thread.join(HANG_SECONDS)
    assert shown.texts == ["only"]


def test_output_is_that_of_the_notebook_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marimo", raising=False)
    assert open_cell_output() is None
    for is_notebook in (False, True):
        monkeypatch.setitem(sys.modules, "marimo", marimo(Shown(), is_notebook=is_notebook))
        assert (open_cell_output() is not None) == is_notebook
