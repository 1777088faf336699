"""Exceptions as bytes and back (rules X2, E05, E06)."""

from __future__ import annotations

import asyncio
import builtins
import gc
import types
from typing import Any

import pytest
import trio
from tests.rows import rows
from tests.wire.odd_exceptions import KeywordOnly
from tests.wire.sent_exceptions import HERE, raised, round_trip

from trimesh._wire.exceptions.codec import encode_exception
from trimesh._wire.pickled.payload import Encoder
from trimesh.errors import RemoteError, leaves, origin

# ---- every builtin ---------------------------------------------------------------------------------------


def builtin_exceptions() -> list[type[Exception]]:
    found: list[type[Exception]] = []
    pending: list[type[Exception]] = [Exception]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if getattr(builtins, cls.__name__, None) is cls:
            found.append(cls)
    return sorted(set(found), key=lambda cls: cls.__name__)


ARGS: dict[type[Exception], tuple[Any, ...]] = {
    UnicodeDecodeError: ("utf-8", b"ab\xffcd", 2, 3, "invalid start byte"),
    UnicodeEncodeError: ("ascii", "ab\xe9", 2, 3, "ordinal not in range"),
    UnicodeTranslateError: ("ab\xe9", 2, 3, "no such character"),
    ExceptionGroup: ("several", [ValueError("one"), KeyError("two")]),
    SyntaxError: ("bad syntax", ("f.py", 3, 5, "a b\n", 3, 6)),
}


@rows("cls", builtin_exceptions())
def test_builtin_exception_round_trips(cls: type[Exception]) -> None:
    """X2: type, text, args, notes and what the C code keeps."""
    error = cls(*next((ARGS[base] for base in cls.__mro__ if base in ARGS), ("something", 3)))
    error.add_note("first note")
    error.add_note("second note")

    arrived = round_trip(raised(error))

    assert type(arrived) is cls
    assert str(arrived) == str(error)
    assert repr(arrived) == repr(error)
    assert repr(arrived.args) == repr(error.args)
    assert arrived.__notes__ == ["first note", "second note"]
    assert native_state(arrived) == native_state(error)


def native_state(error: BaseException) -> dict[str, str]:
    """Return what the C code of builtin exceptions keeps, as text."""
    state: dict[str, str] = {}
    for base in type(error).__mro__:
        if base is BaseException:
            break
        for name, value in vars(base).items():
            if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                state[name] = repr(getattr(error, name, "unset"))
    return state


ATTRIBUTES: dict[str, BaseException] = {
    "import": ImportError("no", name="a.b", path="/x"),
    "os_file": OSError(2, "No such file", "a.txt"),
    "os_files": OSError(18, "Invalid link", "a.txt", None, "b.txt"),
    "blocking": BlockingIOError(11, "again", 5),
    "syntax": SyntaxError("bad", ("f.py", 1, 2, "x y", 1, 3)),
    "stop": StopIteration(42),
    "key": KeyError("k"),
    "name": NameError("no x", name="x"),
    "attribute": AttributeError("no y", name="y", obj=None),
    "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
}


@rows("name", ATTRIBUTES)
def test_native_attributes_survive(name: str) -> None:
    """X2."""
    arrived = round_trip(ATTRIBUTES[name])

    assert native_state(arrived) == native_state(ATTRIBUTES[name])
    assert type(arrived) is type(ATTRIBUTES[name])


def test_real_errors_of_the_interpreter_survive() -> None:
    """X2."""
    for code in (
        "1/0",
        "[][3]",
        "{}['a']",
        "b'\\xff'.decode()",
        "import nowhere_at_all",
        "open('/no/such')",
        "a b",
        "x.",
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any
            exec(code, {})
        arrived = round_trip(caught.value)
        assert type(arrived) is caught.type
        assert str(arrived) == str(caught.value)


def test_attribute_error_leaves_its_object_behind() -> None:
    """X2: `obj` may be an actor with its model."""

    class Huge:
        def __reduce__(self) -> Any:
            raise AssertionError("was pickled")

    arrived = round_trip(AttributeError("no y", name="y", obj=Huge()))

    assert isinstance(arrived, AttributeError)
    assert (arrived.name, arrived.obj) == ("y", None)


def test_native_attributes_that_were_changed_later_survive() -> None:
    """X2."""
    error = OSError(2, "No such file", "a.txt")
    error.filename = None
    error.args = ("other", "args", "now")

    arrived = round_trip(error)

    assert isinstance(arrived, OSError)
    assert (arrived.filename, arrived.errno, arrived.args) == (None, 2, ("other", "args", "now"))


# ---- exceptions that must not become local ones ----------------------------------------------------------


def cancelled() -> BaseException:
    return trio.Cancelled._create(source="unknown")


FOREIGN = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit("x"),
    "asyncio.exceptions.CancelledError": asyncio.CancelledError("x"),
    "trio.Cancelled": cancelled(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_base_exception_is_a_remote_error(name: str) -> None:
    """E06."""
    arrived = round_trip(raised(FOREIGN[name]), where=HERE)

    assert type(arrived) is RemoteError
    assert arrived.type_name == name
    assert arrived.message == str(FOREIGN[name])
    assert origin(arrived) == HERE


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_base_exception_in_a_group_is_a_remote_error(name: str) -> None:
    """E06."""
    inner = BaseExceptionGroup("inner", [FOREIGN[name], ValueError("a")])

    arrived = round_trip(BaseExceptionGroup("outer", [inner, KeyError("b")]))

    assert type(arrived) is ExceptionGroup
    assert [type(leaf) for leaf in leaves(arrived)] == [RemoteError, ValueError, KeyError]


def test_foreign_base_exception_in_a_chain_is_a_remote_error() -> None:
    """E06."""
    error = ValueError("x")
    error.__context__ = KeyboardInterrupt()
    error.__cause__ = SystemExit(2)

    arrived = round_trip(error)

    assert type(arrived.__cause__) is RemoteError
    assert type(arrived.__context__) is RemoteError


class Abort(BaseException):
    pass


def test_base_exception_of_the_user_is_a_remote_error() -> None:
    """E06."""
    arrived = round_trip(Abort("now"))

    assert type(arrived) is RemoteError
    assert arrived.type_name.endswith("Abort")


# ---- what the sender keeps -------------------------------------------------------------------------------


def test_encoding_does_not_change_the_exception() -> None:
    error = raised(KeywordOnly(code=3))
    before = (error.__traceback__, dict(error.__dict__), error.__cause__, error.__context__)

    round_trip(error, where=HERE, note="a note")
    syntax = raised(SyntaxError("bad", ("f.py", 1, 2, "x y", 1, 3)))
    round_trip(syntax)

    assert (error.__traceback__, error.__dict__, error.__cause__, error.__context__) == before
    assert syntax.__traceback__ is not None


def test_encoding_keeps_no_frame_alive() -> None:
    class Mark:
        pass

    def fail() -> None:
        mark = Mark()
        raise ValueError(str(type(mark)))

    encoder = Encoder()
    try:
        fail()
    except ValueError as error:
        encode_exception(error, encoder)
    gc.collect()

    assert not [thing for thing in gc.get_objects() if type(thing) is Mark]
