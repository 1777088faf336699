"""What goes by name, and modules that go by value because the user says so (rule V2)."""

from __future__ import annotations

import functools
import pickle
import sys
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.wire.conftest import Script
from tests.wire.sides import Side

from trimesh._wire.pickled.by_value import by_value
from trimesh.errors import PayloadError


def test_by_value_sends_the_module_that_is_not_there(
    home: Side, away: Side, module: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2."""
    mine = module(
        "mine",
        """
        import threading
        lock = threading.Lock()  # not asked for, not sent
        scale = 3
        class Point:
            def __init__(self, x): self.x = x * scale
        def double(p): return Point(2 * p.x)
        """,
    )
    user = module("mine.user", "import mine\ndef run(x): return mine.double(mine.Point(x)).x, mine.__name__")
    by_value(mine)

    encoded = home.encoder.encode([mine.Point(1), user.run, mine], what="v")
    home.deliver(encoded.definitions, away)
    monkeypatch.delitem(sys.modules, "mine")
    monkeypatch.delitem(sys.modules, "mine.user")
    point, run, arrived = away.decoder.decode(encoded.payload)

    assert point.x == 3
    assert run(1) == (18, "mine")
    assert arrived.Point is type(point)
    assert not hasattr(arrived, "lock")
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert away.send(point, home).__class__ is mine.Point
    assert away.send(arrived, home) is mine


@pytest.mark.parametrize(
    "expression",
    [
        "here.below.deep.answer",
        "[here.below.deep.answer for _ in (1,)][0]",
        "(lambda: here.below.deep.answer)()",
        "next(iter([(lambda: [here.below.deep.answer for _ in (1,)])()[0]]))",
    ],
)
def test_submodules_are_imported_wherever_a_function_names_them(
    home: Side, away: Side, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    """V2: `import here.below.deep` in the script binds `here` only; the other process has imported nothing of it."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    for name in ("__init__.py", "unsaid.py", "below/__init__.py"):
        (tmp_path / "here" / name).touch()
    (tmp_path / "here" / "below" / "deep.py").write_text("answer = 42\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    main = script(f"import here.below.deep, here.unsaid\nclass A:\n    def m(self): return {expression}")
    encoded = home.encoder.encode(main.A, what="v")
    home.deliver(encoded.definitions, away)
    for name in [name for name in sys.modules if name.split(".")[0] == "here"]:
        monkeypatch.delitem(sys.modules, name)

    arrived = away.decoder.decode(encoded.payload)

    assert arrived().m() == 42
    assert "here.unsaid" not in sys.modules


def test_importable_module_goes_by_name(home: Side, away: Side) -> None:
    encoded = home.encoder.encode([textwrap, textwrap.dedent, pickle.Pickler, Side], what="v")

    assert encoded.definitions == ()
    assert away.decoder.decode(encoded.payload) == [textwrap, textwrap.dedent, pickle.Pickler, Side]


def test_class_that_lies_about_its_module_goes_by_value(home: Side, away: Side) -> None:
    lying = type("Lying", (), {"__module__": "textwrap", "x": 3})

    arrived = home.send(lying, away)

    assert arrived is not lying
    assert (arrived.x, arrived.__module__) == (3, "textwrap")


def test_by_value_refuses_what_is_no_module() -> None:
    with pytest.raises(TypeError, match="needs a module"):
        by_value("mine")  # type: ignore[arg-type]


def test_native_types_that_have_no_name_arrive(home: Side, away: Side) -> None:
    values = [type(None), type(...), type(lambda: 0), type(x for x in ()), type(NotImplemented), type(len)]

    assert home.send(values, away) == values


def test_module_made_at_run_time_is_refused(home: Side) -> None:
    with pytest.raises(TypeError, match="got nowhere, made at run time"):
        home.encoder.encode(ModuleType("nowhere"), what="v")


def test_global_whose_module_is_missing_there_is_a_payload_error(
    home: Side, away: Side, script: Script, module: Callable[[str, str], Any]
) -> None:
    module("only_at_home", "x = 1")
    main = script("import only_at_home\ndef f(): return only_at_home.x")
    encoded = home.encoder.encode(main.f, what="f")
    home.deliver(encoded.definitions, away)
    del sys.modules["only_at_home"]

    with pytest.raises(PayloadError, match=r"global only_at_home of __main__ .* No module named 'only_at_home'"):
        away.decoder.decode(encoded.payload)


def test_importable_helpers_go_by_name(home: Side, away: Side) -> None:
    values = [typing.AnyStr, cached_there, NewKind]

    encoded = home.encoder.encode(values, what="v")

    assert encoded.definitions == ()
    assert away.decoder.decode(encoded.payload) == values


@functools.lru_cache
def cached_there() -> int:
    return 1


NewKind = typing.NewType("NewKind", int)
