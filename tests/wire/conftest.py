"""Three processes that talk by value, the user's script, and modules made for a test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.wire.sides import Side, side

from trimesh._wire.pickled import by_value as by_value_module

Script = Callable[[str], Any]


@pytest.fixture
def home() -> Side:
    return side("home", 0xA, is_worker=False)


@pytest.fixture
def away() -> Side:
    return side("away", 0xB)


@pytest.fixture
def third() -> Side:
    return side("third", 0xC)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a text as the user's `__main__` and return it; later texts are cells of the same notebook."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(source: str) -> Any:
        exec(compile(textwrap.dedent(source), "script.py", "exec", dont_inherit=True), main.__dict__)
        return main

    return run


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Make a module of a name and a text, known to this process."""

    def make(name: str, source: str) -> Any:
        made = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(compile(textwrap.dedent(source), f"{name}.py", "exec", dont_inherit=True), made.__dict__)
        return made

    return make


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value_module, "_modules", set())
