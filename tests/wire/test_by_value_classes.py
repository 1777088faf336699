"""Classes of every kind go by value and come home (rule V2)."""

from __future__ import annotations

import sys
import textwrap
import types
import typing
from types import ModuleType
from typing import Any

import pytest
from tests.wire.class_scripts import SCRIPTS
from tests.wire.conftest import Script
from tests.wire.sides import Side


@pytest.mark.parametrize(("script", "expression"), [s[1:] for s in SCRIPTS], ids=[s[0] for s in SCRIPTS])
def test_class_of_any_kind_arrives(
    script: str, expression: str, home: Side, away: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2: it works there as it does here, stays one object, and comes home as itself."""
    main: Any = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(textwrap.dedent(script), "script.py", "exec", dont_inherit=True), main.__dict__)

    arrived = home.send(main.A, away)

    assert arrived is not main.A
    assert repr(eval(expression, {"A": arrived})) == repr(eval(expression, {"A": main.A}))
    assert (arrived.__name__, arrived.__module__) == (main.A.__name__, main.A.__module__)
    assert home.send(main.A, away) is arrived
    assert away.send(arrived, home) is main.A


def test_instances_of_local_classes_arrive(home: Side, away: Side) -> None:
    """V2: `<locals>` of an importable module."""

    class Local:
        def __init__(self) -> None:
            self.side = Side

    arrived = home.send(Local(), away)

    assert type(arrived) is not Local
    assert arrived.side is Side
    assert type(away.send(arrived, home)) is Local
    assert "Local" not in away.main.__dict__


def test_dataclass_can_be_subclassed_and_replaced_there(home: Side, away: Side, script: Script) -> None:
    main = script("""
        import dataclasses
        @dataclasses.dataclass
        class Base:
            x: int
            y: list = dataclasses.field(default_factory=list)
            _: dataclasses.KW_ONLY = dataclasses.KW_ONLY
            z: int = 0
        def derive():
            @dataclasses.dataclass
            class Derived(Base):
                w: int = 5
            return dataclasses.replace(Derived(1, [2]), w=7), [f.name for f in dataclasses.fields(Derived)]
    """)

    made, names = home.send(main.derive, away)()

    assert (made.x, made.y, made.z, made.w) == (1, [2], 0, 7)
    assert names == ["x", "y", "z", "w"]


def test_class_attribute_set_later_stays_at_home(home: Side, away: Side, script: Script) -> None:
    """BV-3."""
    main = script("class A: x = 1")
    arrived = home.send(main.A, away)
    main.A.x = 2

    assert home.send(main.A, away) is arrived
    assert arrived.x == 1


def test_views_and_proxies_arrive(home: Side, away: Side) -> None:
    names = {"a": 1}
    views = (names.keys(), names.values(), names.items(), types.MappingProxyType(names))

    keys, values, items, proxy = home.send(views, away)

    assert (list(keys), list(values), list(items), proxy["a"]) == (["a"], [1], [("a", 1)], 1)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_type_parameters_arrive(home: Side, away: Side, script: Script) -> None:
    main = script("class A[T: int, *Ts, **P]:\n    def get[U](self, x: U) -> U: return x")

    arrived = home.send(main.A, away)

    assert arrived[int, str, [int]]().get(3) == 3
    assert [str(p) for p in arrived.__type_params__] == [str(p) for p in main.A.__type_params__]
    assert [p.__name__ for p in arrived.get.__type_params__] == ["U"]


@pytest.mark.skipif(sys.version_info < (3, 13), reason="defaults of type parameters came with Python 3.13")
def test_defaults_of_type_parameters_arrive(home: Side, away: Side, script: Script) -> None:
    main = script("class A[T = int, **P = [int]]: pass\nclass B[*Ts = *tuple[int, str]]: pass")

    for cls in (main.A, main.B):
        arrived = home.send(cls, away)
        defaults = [str(parameter.__default__) for parameter in arrived.__type_params__]
        assert defaults == [str(parameter.__default__) for parameter in cls.__type_params__]


def test_annotations_that_are_never_read_here_arrive(home: Side, away: Side) -> None:
    """V2: with the objects that they name, as those are here."""

    class Part:
        size: int

    class Whole:
        first: Part
        rest: list[Part]

        def add(self, part: Part) -> Whole: ...

    Whole.add.__annotations__["return"] = Whole
    arrived, part = home.send((Whole, Part), away)

    assert typing.get_type_hints(arrived, None, {"Part": part}) == {"first": part, "rest": list[part]}
    assert arrived.add.__annotations__["return"] is arrived


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated late since Python 3.14")
class TestNamesThatAreNotDefinedYet:
    """`main` has no `Later` when it is sent: a checker's import, or a class further down."""

    def test_of_a_function_arrive_as_text(self, home: Side, away: Side, script: Script) -> None:
        main = script("def f(x: Later, y: int, *rest: list[Later]) -> dict[str, Later]: return x")

        arrived = home.send(main.f, away)

        assert arrived(3, 4) == 3
        hints = typing.get_type_hints(arrived, None, {"Later": float})
        assert hints == {"x": float, "y": int, "rest": list[float], "return": dict[str, float]}

    def test_of_a_class_arrive_as_text(self, home: Side, away: Side, script: Script) -> None:
        main = script("class A:\n    x: Later\n    y: list[Later]\n    z: int")

        arrived = home.send(main.A, away)

        assert typing.get_type_hints(arrived, None, {"Later": float}) == {"x": float, "y": list[float], "z": int}

    def test_of_a_typed_dict_arrive_as_text(self, home: Side, away: Side, script: Script) -> None:
        main = script("import typing\nclass A(typing.TypedDict):\n    x: Later\n    z: int")

        arrived = home.send(main.A, away)

        assert arrived(x=1, z=2) == {"x": 1, "z": 2}
        assert typing.get_type_hints(arrived, None, {"Later": float}) == {"x": float, "z": int}

    @pytest.mark.parametrize("decorator", ["dataclasses.dataclass", "attrs.define"])
    def test_of_fields_arrive_as_text(self, home: Side, away: Side, script: Script, decorator: str) -> None:
        main = script(f"""
            import attrs, dataclasses
            @{decorator}
            class A:
                x: Later
                y: list[Later] = ()
        """)

        arrived = home.send(main.A, away)

        assert repr(arrived(1)) == "A(x=1, y=())"
        assert typing.get_type_hints(arrived, None, {"Later": float}) == {"x": float, "y": list[float]}
        assert typing.get_type_hints(arrived.__init__, None, {"Later": float})["x"] is float

    @pytest.mark.parametrize("decorator", ["dataclasses.dataclass", "attrs.define(slots=False)"])
    def test_class_that_names_itself_arrives_as_itself(
        self, home: Side, away: Side, script: Script, decorator: str
    ) -> None:
        """Its fields were made before its name was bound."""
        main = script(f"""
            import attrs, dataclasses
            @{decorator}
            class A:
                next: A | None = None
                one: A = None
            def types():
                found = attrs.fields(A) if attrs.has(A) else dataclasses.fields(A)
                return [field.type for field in found]
        """)

        arrived, types = home.send((main.A, main.types), away)

        assert arrived.__annotations__ == {"next": arrived | None, "one": arrived}
        assert types()[1] is arrived
        assert away.send(arrived, home) is main.A


def test_error_names_the_attribute_of_a_class_with_annotations(home: Side, away: Side, script: Script) -> None:
    main = script("import threading\nclass A:\n    held: threading.Lock\n    lock = threading.Lock()")

    with pytest.raises(TypeError, match="its attribute 'lock' cannot be serialised"):
        home.send(main.A, away)
