"""Functions of every kind go by value and come home (rule V2)."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
from tests.wire.conftest import Script
from tests.wire.sides import Side

from trimesh._wire.memory import DefinitionId


def test_function_of_main_keeps_its_identity(home: Side, away: Side, script: Script) -> None:
    """V2."""
    main = script("def f(x, y=2, *, z=3):\n    'says so'\n    return x + y + z\nf.mark = 5")

    f, again = home.send((main.f, [main.f]), away)

    assert again[0] is f
    assert (f(1), f(1, 1, z=1), f.__doc__, f.mark, f.__name__, f.__module__) == (6, 3, "says so", 5, "f", "__main__")
    assert home.send(main.f, away) is f
    assert away.send(f, home) is main.f


@pytest.mark.parametrize(
    ("source", "argument", "expected"),
    [
        ("f = lambda x: x + 1", 1, 2),
        ("def outer(n):\n    def inner(x): return x + n\n    return inner\nf = outer(4)", 1, 5),
        ("import functools\ndef add(a, b): return a + b\nf = functools.partial(add, 3)", 1, 4),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)", 5, 120),
        ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n and even(n - 1)\nf = even", 10, True),
        ("def make():\n    def fact(n): return 1 if n < 2 else n * fact(n - 1)\n    return fact\nf = make()", 5, 120),
        ("from functools import lru_cache\n@lru_cache\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)", 30, 832040),
        ("import os.path as p\nf = lambda x: p.join('a', x)", "b", "a/b"),
        (
            "import xml.dom\nimport xml.dom.minidom\nf = lambda x: xml.dom.minidom.parseString(x).nodeName",
            "<a/>",
            "#document",
        ),
        ("class A:\n    def m(self, x): return x\nf = A().m", 3, 3),
        ("class A:\n    @classmethod\n    def m(cls, x): return cls.__name__ + x\nf = A.m", "b", "Ab"),
        ("class A:\n    @staticmethod\n    def m(x): return x\nf = A.m", 3, 3),
        ("f = (lambda a, b=[]: b + [a])", 3, [3]),
        ("exec('def g(x): return x + k', ns := {'k': 5})\nf = ns['g']", 3, 8),
    ],
    ids=lambda value: value.replace("\n", "; ")[:40] if isinstance(value, str) else "",
)
def test_function_of_any_kind_arrives(
    home: Side, away: Side, script: Script, source: str, argument: Any, expected: Any
) -> None:
    """V2."""
    main = script(source)

    arrived = home.send(main.f, away)

    assert arrived(argument) == expected
    assert away.send(arrived, home)(argument) == expected


def test_method_comes_home_as_itself(home: Side, away: Side, script: Script) -> None:
    main = script("class A:\n    def m(self): pass")

    assert away.send(home.send(main.A.m, away), home) is main.A.m


def test_coroutines_and_generators_arrive(home: Side, away: Side, script: Script) -> None:
    main = script("""
        async def one(): return 1
        def two():
            yield 1
            yield 2
    """)
    one, two = home.send((main.one, main.two), away)

    with pytest.raises(StopIteration) as caught:
        one().send(None)
    assert caught.value.value == 1
    assert list(two()) == [1, 2]


def test_closures_share_their_cells(home: Side, away: Side, script: Script) -> None:
    main = script("""
        def counter():
            n = 0
            def add():
                nonlocal n
                n += 1
            def get(): return n
            def unset():
                if False: later = 1
                return lambda: later
            return add, get, unset()
    """)

    add, get, unset = home.send(main.counter(), away)
    add()
    add()

    assert get() == 2
    with pytest.raises(NameError):
        unset()


def test_lambda_in_a_loop_sends_its_code_once(home: Side, away: Side, script: Script) -> None:
    """A definition for each turn would never be given back."""
    main = script("def make(n): return lambda x: x + n")

    results = [home.send(main.make(n), away)(1) for n in range(50)]

    assert results == list(range(1, 51))
    assert len(home.sent) <= 3


def test_functions_of_a_module_share_its_globals(home: Side, away: Side, script: Script) -> None:
    main = script("""
        count = 0
        seen = []
        def add():
            global count
            count += 1
            seen.append(count)
        def get(): return count, seen
    """)

    home.send(main.add, away)()
    home.send(main.add, away)()
    get = home.send(main.get, away)  # a later definition brings no old values along

    assert get() == (2, [1, 2])
    assert main.get() == (0, [])


def test_global_that_is_bound_anew_arrives_with_the_next_definition(home: Side, away: Side, script: Script) -> None:
    """BV-3."""
    main = script("rate = 1\ndef f(): return rate")
    f = home.send(main.f, away)
    main = script("rate = 2\ndef g(): return rate")

    g = home.send(main.g, away)

    assert (f(), g()) == (2, 2)


def test_older_definition_that_is_made_late_does_not_undo_a_newer_global(
    home: Side, away: Side, third: Side, script: Script
) -> None:
    main = script("rate = 1\ndef f(): return rate")
    home.send(main.f, away)
    main = script("rate = 2\ndef g(): return rate")

    g = home.send(main.g, third)
    f = home.send(main.f, third)

    assert (f(), g()) == (2, 2)


def test_global_that_holds_an_instance_of_its_user_arrives(home: Side, away: Side, script: Script) -> None:
    main = script("""
        class Config:
            def __init__(self): self.name = "c"
            def __setstate__(self, state): self.name = state["name"] + "!"
            def get(self): return config.name
        config = Config()
    """)

    arrived = home.send(main.config, away)

    assert arrived.get() == "c!"


def test_large_global_travels_once(home: Side, away: Side, script: Script) -> None:
    main = script("table = bytes(1_000_000)\ndef f(): return len(table)\ndef g(): return len(table) + 1")

    results = [home.send(main.f, away)(), home.send(main.g, away)()]

    assert results == [1_000_000, 1_000_001]
    total = sum(len(home.definitions.bytes_of(d).payload) for _, d in home.sent)
    assert total < 1_010_000


def test_function_of_an_importable_module_uses_the_real_one(home: Side, away: Side) -> None:
    def local() -> Any:
        return sys.modules, DefinitionId

    arrived = home.send(local, away)

    assert arrived is not local
    assert arrived.__globals__ is globals()
    assert arrived()[0] is sys.modules


def test_local_cached_function_and_cell_arrive(home: Side, away: Side) -> None:
    n = 3

    @functools.lru_cache(maxsize=7)
    def local(x: int) -> int:
        return x + n

    arrived = home.send(local, away)
    cells = home.send((types.CellType(), types.CellType(5)), away)

    assert (arrived(1), arrived.cache_parameters()["maxsize"], arrived.cache_info().currsize) == (4, 7, 1)
    assert cells[1].cell_contents == 5
    with pytest.raises(ValueError, match="empty"):
        _ = cells[0].cell_contents


def test_code_keeps_its_file(home: Side, away: Side, script: Script) -> None:
    """V2: tracebacks and stacks of the other process name it, also for what is defined inside."""
    main = script("def outer():\n    def inner(): pass\n    return inner")
    file = main.outer.__code__.co_filename

    outer = home.send(main.outer, away)

    assert not file.startswith("<dyn")
    assert (outer.__code__.co_filename, outer().__code__.co_filename) == (file, file)
