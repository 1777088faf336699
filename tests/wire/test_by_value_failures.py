"""What cannot go by value is named, and leaves nothing behind (rule V2)."""

from __future__ import annotations

import pickle

import pytest
from tests.wire.conftest import Script
from tests.wire.sides import Side

from trimesh import limits
from trimesh._wire.pickled import definition_bodies
from trimesh._wire.pickled.by_value import Definitions
from trimesh.errors import RemoteError

# ---- exceptions of classes that go by value --------------------------------------------------------------


def test_exception_of_main_is_caught_by_its_class(home: Side, away: Side, script: Script) -> None:
    """V2, X2."""
    main = script("""
        class MyError(Exception):
            def __init__(self, *, code):
                super().__init__(f"code {code}")
                self.code = code
        def fail():
            raise MyError(code=3)
    """)
    fail = home.send(main.fail, away)
    try:
        fail()
    except Exception as error:  # noqa: BLE001 - the other side's class
        arrived = away.throw(error, home)

    caught = []
    try:
        raise ExceptionGroup("g", [arrived])
    except* main.MyError as group:
        caught.append(group.exceptions[0].code)
    assert caught == [3]


def test_exception_of_main_that_never_left_home_arrives(home: Side, away: Side, script: Script) -> None:
    main = script("class MyError(Exception): pass")

    arrived = home.throw(main.MyError("x"), away)

    assert type(arrived).__name__ == "MyError"
    assert type(away.throw(arrived, home)) is main.MyError


def test_exception_whose_class_cannot_travel_is_a_remote_error(home: Side, away: Side, script: Script) -> None:
    """E05."""
    main = script("import threading\nclass MyError(Exception):\n    lock = threading.Lock()")

    arrived = home.throw(main.MyError("x"), away)

    assert type(arrived) is RemoteError
    assert (arrived.type_name, arrived.message) == ("__main__.MyError", "x")


# ---- what cannot travel ----------------------------------------------------------------------------------


def test_class_that_cannot_travel_names_the_attribute(home: Side, script: Script) -> None:
    """V2."""
    main = script("import threading\nclass A:\n    lock = threading.Lock()\n    def f(self): pass")

    with pytest.raises(
        TypeError, match=r"argument 'a'.* class __main__.A goes by value.*'lock'.*cannot pickle"
    ) as caught:
        home.encoder.encode([main.A()], what="argument 'a' of f()")
    assert "at [0]" in str(caught.value)


def test_global_that_cannot_travel_is_named(home: Side, script: Script) -> None:
    """V2."""
    main = script("import threading\nlock = threading.Lock()\ndef f(): return lock")

    text = r"__main__.f goes by value with global lock of __main__: cannot pickle .*move the definition into a module"
    with pytest.raises(TypeError, match=text):
        home.encoder.encode(main.f, what="f")


def test_failed_definition_leaves_nothing_behind(home: Side, away: Side, script: Script) -> None:
    main = script("""
        import threading
        lock = threading.Lock()
        class A:
            def f(self): return B
        class B:
            def f(self): return A, lock
    """)
    for value in (main.A, main.B):
        with pytest.raises(TypeError):
            home.encoder.encode(value, what="v")
    script("lock = None")

    a = home.send(main.A, away)

    assert a().f()().f() == (a, None)


def test_default_and_closure_that_cannot_travel_are_named(home: Side, script: Script) -> None:
    """V2."""
    main = script("""
        import threading
        lock = threading.Lock()
        def given(a=lock): pass
        def make(inner):
            def held(): return inner
            return held
        held = make(lock)
        held.__qualname__ = "held"
    """)

    with pytest.raises(TypeError, match=r"function __main__.given goes by value, but its default <unlocked"):
        home.encoder.encode(main.given, what="v")
    with pytest.raises(TypeError, match=r"function __main__.held goes by value, but its closure's 'inner' cannot"):
        home.encoder.encode(main.held, what="v")


def test_body_that_fails_as_a_whole_only_says_so(home: Side, script: Script) -> None:
    main = script("""
        class Meta(type):
            @property
            def __mro_entries__(cls): return None
        class A(metaclass=Meta):
            class Odd:
                def __reduce__(self): raise ValueError("odd")
        A.odd = A.Odd()
    """)

    with pytest.raises(TypeError, match=r"A goes by value, but its attribute 'odd' cannot be serialised: odd"):
        home.encoder.encode(main.A, what="v")


def test_interrupt_while_a_definition_is_encoded_leaves_nothing_behind(home: Side, away: Side, script: Script) -> None:
    main = script("""
        class Odd:
            def __reduce__(self): raise KeyboardInterrupt
        class A:
            odd = Odd()
    """)
    with pytest.raises(KeyboardInterrupt):
        home.encoder.encode(main.A, what="v")
    main.A.odd = 3

    assert home.send(main.A, away).odd == 3


def test_interrupt_while_a_definition_is_made_leaves_nothing_behind(
    home: Side, away: Side, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = script("""
        class Meta(type):
            def __new__(meta, *args, **options):
                import builtins
                if getattr(builtins, "interrupt", False): raise KeyboardInterrupt
                return super().__new__(meta, *args, **options)
        class A(metaclass=Meta): pass
    """)
    encoded = home.encoder.encode(main.A, what="v")
    home.deliver(encoded.definitions, away)
    monkeypatch.setattr("builtins.interrupt", True, raising=False)
    with pytest.raises(KeyboardInterrupt):
        away.decoder.decode(encoded.payload)
    monkeypatch.setattr("builtins.interrupt", False)

    assert away.decoder.decode(encoded.payload).__name__ == "A"


def test_definition_outside_of_a_link_is_refused(home: Side, script: Script) -> None:
    main = script("class A: pass\ndef f(): pass")

    for value in (main.A(), main.f, lambda: 0):
        encoded = home.encoder.encode(value, what="v")
        with pytest.raises(TypeError, match="only by the decoder of a link"):
            pickle.loads(encoded.payload)
    with pytest.raises(TypeError, match="only by the decoder of a link"):
        definition_bodies.restore_function(main.f, ({}, {}, None, {}, []))


def test_table_without_an_encoder_says_so() -> None:
    with pytest.raises(TypeError, match="give them to both"):
        Definitions(1).enter(Side, "Side", Side)


def test_too_many_definitions_are_refused(home: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEFINITIONS_MAX", 5)

    def make() -> type:
        class Local:
            pass

        return Local

    for _ in range(3):  # one for each class, and one for what its methods share
        home.encoder.encode(make(), what="v")

    with pytest.raises(TypeError, match=r"define classes once"):
        home.encoder.encode([make() for _ in range(5)], what="v")
