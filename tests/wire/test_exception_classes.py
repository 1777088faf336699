"""Exceptions of classes, and with parts, that do not travel as they are (rules X2, E05)."""

from __future__ import annotations

import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from tests.rows import rows
from tests.wire.odd_exceptions import (
    AttrsError,
    BadProperties,
    BadStr,
    Decode,
    File,
    Final,
    FrozenAttrsError,
    HostileError,
    KeywordOnly,
    LyingReduce,
    ManyParameters,
    NoGetattr,
    OtherNew,
    RaisingReduce,
    ReadOnlyArgs,
    Slotted,
    StrangeNew,
    Unsettable,
)
from tests.wire.sent_exceptions import HERE, raised, remote_texts, round_trip

from trimesh import limits
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.pickled.payload import Decoder, Encoder
from trimesh.errors import LimitExceeded, ProcDied, RemoteCancelled, RemoteError, ShapeError, origin

# ---- classes that break pickle ---------------------------------------------------------------------------


NASTY: dict[str, tuple[BaseException, dict[str, Any]]] = {
    "keyword_only": (KeywordOnly(code=3), {"code": 3}),
    "many_parameters": (ManyParameters(1, 2, 3), {"total": 6}),
    "slots": (Slotted(4), {"position": 4}),
    "final": (Final("x"), {}),
    "lying_reduce": (LyingReduce("x"), {}),
    "raising_reduce": (RaisingReduce("x"), {}),
    "strange_new": (StrangeNew(code=5), {"code": 5}),
    "decode": (Decode(b"\xff"), {"data": b"\xff", "start": 0, "reason": "odd"}),
    "file": (File("a.txt", mode="r"), {"mode": "r", "filename": "a.txt", "errno": 2}),
    "attrs": (AttrsError(1, "b"), {"first": 1, "second": "b"}),
    "frozen_attrs": (FrozenAttrsError(1), {"first": 1}),
    "shape_error": (ShapeError("x"), {}),
    "limit": (LimitExceeded("EVENTS", 3), {"limit": "EVENTS", "value": 3}),
    "proc_died": (ProcDied("gone", signal=9, oom_killed=True), {"signal": 9, "oom_killed": True, "reason": "exited"}),
    "remote_cancelled": (RemoteCancelled(reason="r", canceller="c"), {"reason": "r", "canceller": "c"}),
    "remote_error": (RemoteError("a.B", "text"), {"type_name": "a.B", "message": "text"}),
}


@rows("name", NASTY)
def test_exception_that_breaks_pickle_round_trips(name: str) -> None:
    """E05."""
    error, attributes = NASTY[name]

    arrived = round_trip(error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert {name: getattr(arrived, name) for name in attributes} == attributes


def test_init_of_the_user_does_not_run() -> None:
    """X2."""
    error = ManyParameters(1, 2, 3)
    before = ManyParameters.ran

    round_trip(error)

    assert ManyParameters.ran == before


def test_read_only_args_property_arrives() -> None:
    """E05."""
    arrived = round_trip(ReadOnlyArgs("true args"))

    assert type(arrived) is ReadOnlyArgs
    assert BaseException.args.__get__(arrived) == ("true args",)  # type: ignore[attr-defined]


def test_class_that_refuses_attributes_still_has_its_origin() -> None:
    """E05."""
    arrived = round_trip(Unsettable("x"), where=HERE, note="at gpus=2")

    assert type(arrived) is Unsettable
    assert origin(arrived) == HERE
    assert arrived.__notes__ == ["at gpus=2"]


def test_new_that_makes_something_else_is_passed_by() -> None:
    """E05."""
    error = OtherNew("x")
    BaseException.args.__set__(error, (0,))  # type: ignore[attr-defined]

    assert type(round_trip(error)) is OtherNew


def test_exception_without_text_arrives() -> None:
    """E05."""
    arrived = round_trip(raised(BadStr("x")), note="here")

    assert isinstance(arrived, BadStr)
    assert str(arrived) == "<str of tests.wire.odd_exceptions.BadStr failed>"
    assert "<str of " in remote_texts(arrived)[0]


# ---- parts that do not travel ----------------------------------------------------------------------------


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "socket": socket.socket,
    "traceback": lambda: raised(ValueError()).__traceback__,
    "frame": sys._getframe,
    "generator": lambda: (x for x in ()),
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_part_that_does_not_travel_becomes_its_repr(name: str) -> None:
    """X2."""
    thing = UNPICKLABLE[name]()
    error = ValueError("text", 1)
    error.args = ("text", thing)
    error.thing = thing  # type: ignore[attr-defined]
    error.other = [1, 2]  # type: ignore[attr-defined]
    try:
        arrived: Any = round_trip(error)

        assert type(arrived) is ValueError
        assert arrived.args[0] == "text"
        assert arrived.other == [1, 2]
        assert isinstance(arrived.thing, str)
        assert type(thing).__name__ in arrived.thing
        assert arrived.args[1] == arrived.thing
    finally:
        if isinstance(thing, socket.socket):
            thing.close()


def test_part_that_is_too_large_becomes_its_repr() -> None:
    """X2."""
    error: Any = ValueError("text")
    error.blob = list(range(limits.EXCEPTION_PAYLOAD_BYTES_MAX))

    encoded = encode_exception(error, Encoder())
    arrived: Any = decode_exception(encoded.payload, Decoder())

    assert encoded.nbytes < 10_000
    assert arrived.blob.startswith("[0, 1, 2")


def test_long_strings_are_cut_and_keep_their_type() -> None:
    """X2."""
    error = UnicodeDecodeError("utf-8", b"\xff" * (2 * limits.EXCEPTION_PAYLOAD_BYTES_MAX), 3, 4, "bad")

    encoded = encode_exception(error, Encoder(), note="n")
    arrived = decode_exception(encoded.payload, Decoder())

    assert encoded.nbytes < 4 * limits.TRACEBACK_CHARS_MAX + 10_000
    assert isinstance(arrived, UnicodeDecodeError)
    assert str(arrived) == str(error)
    assert len(arrived.object) == limits.TRACEBACK_CHARS_MAX


def test_part_that_cannot_be_rebuilt_here_becomes_its_repr() -> None:
    """X2."""

    class Failing:
        def __repr__(self) -> str:
            return "<failing>"

        def __reduce__(self) -> Any:
            return (int, ("no number",))

    error: Any = ValueError("text")
    error.part = Failing()

    assert round_trip(error).part == "<failing>"  # type: ignore[attr-defined]


def test_part_whose_repr_fails_is_still_named() -> None:
    class Part:
        def __reduce__(self) -> Any:
            raise RuntimeError("no")

        def __repr__(self) -> str:
            raise RuntimeError("no")

    error: Any = ValueError(1)
    error.part = Part()

    assert "Part" in round_trip(error).part  # type: ignore[attr-defined]


# ---- classes that break every promise --------------------------------------------------------------------


def test_class_that_cannot_be_imported_is_a_remote_error() -> None:
    """E05."""
    module = types.ModuleType("only_over_there")
    module.Error = type("Error", (ValueError,), {"__module__": "only_over_there"})  # type: ignore[attr-defined]
    sys.modules["only_over_there"] = module
    try:
        error = module.Error("what happened")
        error.add_note("a note")
        encoded = encode_exception(error, Encoder(), where=HERE)
    finally:
        del sys.modules["only_over_there"]

    arrived = decode_exception(encoded.payload, Decoder())

    assert type(arrived) is RemoteError
    assert (arrived.type_name, arrived.message) == ("only_over_there.Error", "what happened")
    assert arrived.__notes__ == [
        "only_over_there.Error cannot be imported or made here: define it in a module that this process has",
        "a note",
    ]
    assert origin(arrived) == HERE


def test_metaclass_and_dictionary_oddities_do_no_harm() -> None:
    """E05."""
    error: Any = ValueError("a \ud800 surrogate")
    error.__dict__["\ud800"] = 1
    error.__dict__[3] = 1
    error.__notes__ = ["\ud800", 7]

    arrived = round_trip(error)

    assert type(arrived) is ValueError
    assert arrived.args == ("a \ud800 surrogate",)
    assert arrived.__notes__ == ["\\ud800", "7"]


def test_class_that_answers_no_question_arrives() -> None:
    """EX-1."""
    arrived = round_trip(raised(NoGetattr("x")), where=HERE, note="on gpus=2")

    assert type(arrived) in {NoGetattr, RemoteError}
    assert "on gpus=2" in vars(arrived)["__notes__"]


def test_class_with_a_hostile_metaclass_arrives() -> None:
    """EX-1."""
    arrived = round_trip(raised(HostileError("x")), where=HERE)

    assert type(arrived) is RemoteError
    assert arrived.message == "x"
    assert origin(arrived) == HERE


def test_property_in_place_of_a_native_attribute_does_no_harm() -> None:
    """EX-2."""
    error = BadProperties(2, "No such file", "a.txt")

    arrived = round_trip(error, note="n")

    assert type(arrived) is BadProperties
    assert OSError.filename.__get__(arrived) == "a.txt"  # type: ignore[attr-defined]
    assert vars(arrived)["__notes__"] == ["n"]
