"""What a peer may send in place of values: each decoder takes time and memory by the size of its bytes, or refuses."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import limits
from trimesh._runtime.channels import ports
from trimesh._runtime.spawner import wire as spawner_wire
from trimesh._wire import messages, observed
from trimesh._wire.exceptions.codec import ExceptionRecord, ExceptionValue, decode_exception, encode_records
from trimesh._wire.memory import STOP
from trimesh._wire.typed.codec import BYTEARRAY, FROZENSET, KIND, PAIRS, SET, TUPLE, DecodeSource
from trimesh._wire.typed.known_kinds import TypedDecoder, TypedEncoder
from trimesh.errors import PayloadError, ProtocolError

ports.register_kinds()

numpy = pytest.importorskip("numpy")

Ext, encode = msgspec.msgpack.Ext, msgspec.msgpack.encode

BYTES_MAX = 1 << 20
"""What a refusal may cost, whatever came."""

FACTOR_MAX = 256
"""Bytes of Python objects for a byte of a payload: an empty container is 1 byte on the wire, and 216 as a set."""


def kind(name: str, *parts: Any) -> Any:
    """Return a value of a kind, by hand."""
    return Ext(KIND, encode([name, *parts]))


def tup(*parts: Any) -> Any:
    """Return a tuple, by hand."""
    return Ext(TUPLE, encode(list(parts)))


def peak_of(work: Callable[[], object]) -> int:
    """Return how much memory of Python is taken at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def decode(payload: bytes) -> Any:
    """Decode what a worker has sent; only these two errors may come out."""
    try:
        return TypedDecoder(DecodeSource()).decode(payload)
    except (ProtocolError, PayloadError) as error:
        return error


def region(size: int, base: int, where: Any, excluded: Any = ()) -> Any:
    """Return a region of one dimension, by hand."""
    return kind("region", kind("extent", ["a", base]), None, kind("extent", ["a", size]), where, list(excluded))


HUGE = 2**40
LAZY = types.ModuleType("trimesh_tests_lazy_module")
"""A module that makes a class when it is first asked for: no peer has it do that."""


def make_class(name: str) -> type:
    if name != "Class":
        raise AttributeError(name)
    return type(name, (), {})


vars(LAZY)["__getattr__"] = make_class
sys.modules[LAZY.__name__] = LAZY

REFUSED = {
    "huge region": region(HUGE, HUGE, [0, HUGE, 1]),
    "huge region of values": kind("values", region(HUGE, HUGE, [0, HUGE, 1]), 1),
    "ranks that are not there": region(4, 4, [0, 10**9, 1]),
    "ranks outside of the mesh": region(4, 4, [4, 8, 1]),
    "negative ranks": region(4, 4, [-4, 0, 1]),
    "ranks that come twice": region(4, 4, tup(0, 1, 1, 2)),
    "excluded ranks that are not there": region(4, 4, [0, 4, 1], [7]),
    "step of nothing": region(4, 4, [0, 4, 0]),
    "more ranks than 64 bits count": region(4, 4, [0, 2**63, 1]),
    "many dimensions": kind("extent", *[[f"d{number}", 2**62] for number in range(3000)]),
    "array of shared bytes": kind("array", Ext(1, encode(0)), "<f8", tup(HUGE), tup(0), 0, 8),
    "array without bytes": kind("array", None, "<f8", tup(HUGE)),
    "tensor without bytes": kind("tensor", "float64", None, None, tup(HUGE), tup(1), 0),
    "lazy class": kind("class", LAZY.__name__, "Class"),
    "property of a class": kind("class", "trimesh._runtime.system.child", "Child.nothing"),
    "function": kind("function", "os", "system"),
}


def exception_in(value: bytes) -> bytes:
    """Return a record whose one argument is a value."""
    cls = TypedEncoder().encode(ValueError, what="a class").payload
    return encode_records([record(cls, args=[ExceptionValue(value, "too deep")])])


def record(cls: bytes | None, text: str = "ValueError", **fields: Any) -> ExceptionRecord:
    """Return a record by hand."""
    blank: dict[str, Any] = {
        "args": [],
        "attributes": [],
        "state": [],
        "notes": [],
        "cause": -1,
        "context": -1,
        "suppress": False,
        "members": None,
        "traceback": "",
        "origin": None,
    }
    return ExceptionRecord(cls=ExceptionValue(cls, text), message="m", **{**blank, **fields})


@rows("value", REFUSED.values())
def test_value_is_refused_for_little(value: Any):
    """These name what they have not, or more than there can be."""
    payload = encode(value) + bytes((STOP,))
    decode(payload)  # imports what it needs
    found: list[Any] = []
    assert peak_of(lambda: found.append(decode(payload))) < BYTES_MAX + FACTOR_MAX * len(payload)
    assert isinstance(found[0], ProtocolError | PayloadError)


def test_lies_are_refused_without_assertions():
    """Also under -O: what guards against peers is no assertion."""
    payload = encode(REFUSED["excluded ranks that are not there"]) + bytes((STOP,))
    code = (
        "from trimesh._wire.typed import known_kinds as t; t.register()\n"
        "from trimesh.errors import ProtocolError\n"
        f"try: t.TypedDecoder().decode({payload!r})\n"
        "except ProtocolError: print('refused', __debug__)"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "refused False\n"


def test_exceptions_inside_of_exceptions_have_a_bound():
    """What lies deeper arrives as its text."""
    payload = exception_in(encode(1) + b".")
    for _ in range(limits.EXCEPTION_DEPTH_MAX + 2):
        payload = exception_in(encode(kind("exception", payload)) + b".")
    error: Any = decode_exception(payload, TypedDecoder())
    for _ in range(limits.EXCEPTION_DEPTH_MAX):
        [error] = error.args
    assert error.args == ("too deep",)


CLASS = TypedEncoder().encode(ValueError, what="a class").payload
GROUP = TypedEncoder().encode(ExceptionGroup, what="a class").payload
TABLES = {
    "long chain": [record(CLASS, cause=number + 1, traceback="t") for number in range(4_000)] + [record(CLASS)],
    "many members": [record(GROUP, "ExceptionGroup", members=[1] * (limits.EXCEPTION_CHAIN_MAX + 1)), record(CLASS)],
    "shared members": [record(GROUP, "ExceptionGroup", members=[n + 1, n + 1]) for n in range(400)] + [record(CLASS)],
}


@pytest.mark.parametrize("records", TABLES.values(), ids=TABLES)
def test_table_of_exceptions_is_refused(records: list[ExceptionRecord]):
    """The bounds of the encoder are those of the decoder."""
    with pytest.raises(ProtocolError):
        decode_exception(encode_records(records), TypedDecoder())


def test_largest_table_takes_few_steps():
    """Groups that hold all that follow them, each as far as the bounds go: no step is taken twice."""
    count = limits.EXCEPTION_RECORDS_MAX
    records = [
        record(GROUP, "ExceptionGroup", members=[min(n + 1, count - 1), 0, n][: 1 if n % 64 else 3], traceback="t")
        for n in range(count - 1)
    ]
    steps = 0

    def count_steps(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count_steps)
    try:
        decode_exception(encode_records([*records, record(CLASS)]), TypedDecoder())
    finally:
        sys.setprofile(None)
    assert steps < 1_000 * count


@pytest.mark.parametrize("name", ["split", "derive", "add_note", "subgroup", "with_traceback", "__trimesh_origin__"])
def test_methods_of_an_exception_are_its_own(name: str):
    """A peer must not have a class of its choice called by whoever catches what it sends."""
    part = ExceptionValue(TypedEncoder().encode(subprocess.Popen, what="a class").payload, "text")
    error = decode_exception(encode_records([record(CLASS, state=[(name, part), ("mine", part)])]), TypedDecoder())
    assert name not in error.__dict__
    assert error.__dict__["mine"] is subprocess.Popen


NAMES = [
    "extent",
    "point",
    "region",
    "values",
    "array",
    "scalar",
    "class",
    "enum",
    "exception",
    "tensor",
    "buffer",
    "publication",
    "port",
    "function",
    "actor",
    "x",
]
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(
            lambda code, parts: Ext(code, encode(parts)),
            st.sampled_from([TUPLE, SET, FROZENSET, BYTEARRAY, PAIRS, 1, 9]),
            st.lists(inner, max_size=4) | st.integers(0, 3),
        )
        | st.builds(kind, st.sampled_from(NAMES), inner, inner, inner)
    ),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=300, deadline=None)
def test_any_value_is_decoded_or_refused(value: Any):
    """Whatever parts a kind gets."""
    payload = encode(value) + bytes((STOP,))
    decode(payload)
    assert peak_of(lambda: decode(payload)) < BYTES_MAX + FACTOR_MAX * len(payload)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "head": messages.decode,
    "exception": lambda data: decode_exception(data, TypedDecoder()),
    "value": lambda data: TypedDecoder().decode(data),
    "value with memory": lambda data: TypedDecoder().decode(data + b"\x03"),
    "waits": lambda data: observed.decode_reports(memoryview(data)),
    "record of a spawner": spawner_wire.decode,
}


@pytest.mark.parametrize("name", DECODERS)
@given(st.binary(max_size=200) | st.builds(encode, plain))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_decoded_or_refused(name: str, data: bytes):
    """E12: nothing but these errors, and memory by the size."""

    def work() -> None:
        try:
            DECODERS[name](data)
        except (ProtocolError, PayloadError):
            pass

    work()
    assert peak_of(work) < BYTES_MAX + FACTOR_MAX * len(data)
