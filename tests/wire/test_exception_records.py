"""Laws of the bytes of exceptions, and what foreign ones become (rules E04, EX-2)."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import rows
from tests.wire.odd_exceptions import Final, KeywordOnly
from tests.wire.sent_exceptions import HERE, round_trip

from trimesh._wire.exceptions.codec import (
    ExceptionRecord,
    ExceptionValue,
    OriginRecord,
    decode_exception,
    encode_exception,
    encode_records,
)
from trimesh._wire.pickled.payload import Decoder, Encoder
from trimesh.errors import ProtocolError, RemoteError, RemoteTraceback, leaves

# ---- laws ------------------------------------------------------------------------------------------------


messages = st.text(max_size=20)


leaf_exceptions = st.builds(
    lambda cls, text: cls(text), st.sampled_from([ValueError, KeyError, OSError, Final]), messages
)


def nest(children: st.SearchStrategy[Exception]) -> st.SearchStrategy[Exception]:
    groups = st.builds(ExceptionGroup, messages, st.lists(children, min_size=1, max_size=4))
    return groups | st.builds(chained, children, children, st.booleans())


def chained(error: Exception, other: Exception, suppress: bool) -> Exception:
    error.__cause__ = other if suppress else None
    error.__context__ = other
    return error


def shape_of(error: BaseException | None, seen: frozenset[int] = frozenset()) -> Any:
    """Return the form of an exception, without the remote tracebacks."""
    if error is None or isinstance(error, RemoteTraceback):
        return None
    if id(error) in seen:
        return "again"
    seen |= {id(error)}
    members = [shape_of(m, seen) for m in error.exceptions] if isinstance(error, BaseExceptionGroup) else None
    chain = (shape_of(error.__cause__, seen), shape_of(error.__context__, seen))
    return (type(error), error.args[0], str(error), members, chain)


@given(st.recursive(leaf_exceptions, nest, max_leaves=12), st.lists(messages, max_size=3))
@settings(max_examples=200)
def test_nested_groups_and_chains_round_trip(error: Exception, notes: list[str]) -> None:
    """E04."""
    for note in notes:
        error.add_note(note)

    arrived = round_trip(error)

    assert shape_of(arrived) == shape_of(error)
    assert getattr(arrived, "__notes__", [])[: len(notes)] == notes
    assert len({id(e) for e in leaves(arrived)}) == len({id(e) for e in leaves(error)})


@given(st.binary(max_size=300))
def test_foreign_bytes_are_a_protocol_error(junk: bytes) -> None:
    """EX-2."""
    with pytest.raises(ProtocolError):
        decode_exception(junk, Decoder())


def inside_pickles(payload: bytes) -> set[int]:
    """Return the positions of the bytes of pickles, which is what all `bytes` of a table are."""
    found: set[int] = set()
    left: list[Any] = [msgspec.msgpack.decode(payload)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, bytes):
            for match in re.finditer(re.escape(value), payload):
                found.update(range(*match.span()))
    return found


@given(st.data())
def test_damaged_bytes_are_an_exception_or_a_protocol_error(data: st.DataObject) -> None:
    """EX-2."""
    error = ExceptionGroup("g", [ValueError("a"), KeywordOnly(code=2)])
    error.__context__ = KeyError("b")
    payload = bytearray(encode_exception(error, Encoder(), where=HERE, note="n").payload)
    # Damage outside of the pickles: their bytes may ask for anything, which is the business of authentication.
    position = data.draw(st.sampled_from(sorted(set(range(len(payload))) - inside_pickles(bytes(payload)))))
    payload[position] = data.draw(st.integers(0, 255))

    try:
        arrived = decode_exception(bytes(payload), Decoder())
    except ProtocolError:
        return
    assert isinstance(arrived, Exception)


# ---- tables that break every promise ---------------------------------------------------------------------


def record(**fields: Any) -> ExceptionRecord:
    cls = ExceptionValue(Encoder().encode(fields.pop("of", ValueError), what="v").payload, "builtins.Some")
    plain: dict[str, Any] = {
        "cls": cls, "message": "m", "args": [], "attributes": [], "state": [], "notes": [], "cause": -1,
        "context": -1, "suppress": False, "members": None, "traceback": "", "origin": None,
    }  # fmt: skip
    return ExceptionRecord(**{**plain, **fields})


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(cause=1)],
        [record(context=-2)],
        [record(members=[])],
        [record(members=[1])],
        [record(members=[-1])],
    ],
)
def test_table_with_indices_out_of_range_is_a_protocol_error(records: list[ExceptionRecord]) -> None:
    """EX-2."""
    with pytest.raises(ProtocolError):
        decode_exception(encode_records(records), Decoder())


@rows(
    ("records", "expected"),
    [
        ([record(of=ExceptionGroup)], RemoteError),
        ([record(of=int)], RemoteError),
        ([record(of=3)], RemoteError),
        ([record(of=KeyboardInterrupt)], RemoteError),
        ([record(of=ValueError, members=[0])], RemoteError),
        ([record(of=ValueError, members=[1]), record()], ExceptionGroup),
        ([record(of=ExceptionGroup, members=[1]), record(of=ExceptionGroup, members=[0, 2]), record()], ExceptionGroup),
        ([record(cause=0, context=0, traceback="t")], ValueError),
        ([record(attributes=[("nothing", ExceptionValue(None, "x"))])], ValueError),
        ([record(origin=OriginRecord(ExceptionValue(b"junk", "p"), "m", None, None, "h", 1, 0))], ValueError),
    ],
)
def test_table_that_makes_no_sense_is_an_exception(records: list[ExceptionRecord], expected: type[Exception]) -> None:
    """EX-2, EX-3."""
    assert type(decode_exception(encode_records(records), Decoder())) is expected
