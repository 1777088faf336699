"""User values as bytes and back (rules V1, V2)."""

from __future__ import annotations

import ctypes
import dataclasses
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import limits
from trimesh._wire.memory import Sink, register_reducer
from trimesh._wire.pickled.payload import Decoder, Encoded, Encoder
from trimesh.errors import PayloadError, RemoteTraceback


def received(encoded: Encoded) -> list[memoryview]:
    """Return the bodies as a transport hands them over: writable and private."""
    return [memoryview(bytearray(buffer)) for buffer in encoded.buffers]


def round_trip(value: Any) -> Any:
    encoded = Encoder().encode(value, what="the value")
    return Decoder().decode(encoded.payload, received(encoded))


@dataclasses.dataclass
class Batch:
    step: int
    data: Any = None


class Counted:
    def __init__(self) -> None:
        self.reduced = 0

    def __reduce__(self) -> Any:
        self.reduced += 1
        return (Batch, (self.reduced,))


class Nested:
    """Encodes another value while it is being encoded."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __reduce__(self) -> Any:
        inner = self.encoder.encode([1, 2, 3], what="the inner value")
        return (bytes, (inner.payload,))


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def explode(*_: object) -> None:
    raise LookupError("no such thing here")


class Exploding:
    def __reduce__(self) -> Any:
        return (explode, ())


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_arrive_equal(value: Any) -> None:
    assert round_trip(value) == value


def test_object_of_an_importable_class_goes_by_name() -> None:
    encoded = Encoder().encode(Batch(3), what="the value")

    assert encoded.definitions == ()
    assert Decoder().decode(encoded.payload) == Batch(3)


def test_encoder_leaves_nothing_of_one_value_in_the_next() -> None:
    encoder = Encoder()
    batch = Batch(1, pickle.PickleBuffer(bytearray(5000)))

    first = encoder.encode(batch, what="a")
    second = encoder.encode(batch, what="a")
    third = encoder.encode(7, what="b")

    assert first.payload == second.payload
    assert len(first.buffers) == len(second.buffers) == 1
    assert third.payload == Encoder().encode(7, what="b").payload
    assert third.buffers == ()


def test_encode_runs_a_reduce_once() -> None:
    value = Counted()

    Encoder().encode(value, what="a")

    assert value.reduced == 1


def test_encoder_may_be_entered_from_a_reduce() -> None:
    encoder = Encoder()

    encoded = encoder.encode([Nested(encoder), 5], what="a")
    inner, five = Decoder().decode(encoded.payload)

    assert five == 5
    assert Decoder().decode(inner) == [1, 2, 3]


def test_encoder_drops_its_memo_after_a_large_value() -> None:
    encoder = Encoder()
    value = [str(n) for n in range(50_000)]

    encoded = encoder.encode(value, what="a")

    assert len(encoded.payload) > limits.ENCODER_KEEP_BYTES
    assert encoder.encode(1, what="b").payload == Encoder().encode(1, what="b").payload
    assert Decoder().decode(encoded.payload) == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), ""),
        ({"a": [1, threading.Lock()]}, "['a'][1]"),
        (Batch(1, {"lock": threading.Lock()}), "data['lock']"),
        (Slotted(threading.Lock()), "inner"),
        ([(1, (x for x in ()))], "[0][1]"),
    ],
)
def test_encode_names_the_part_that_cannot_be_serialised(value: Any, path: str) -> None:
    with pytest.raises(TypeError, match=r"^argument 'batch' of add\(\) cannot be serialised: cannot pickle") as caught:
        Encoder().encode(value, what="argument 'batch' of add()")

    assert caught.value.__cause__ is None  # its words are in the text, its frames are the pickler's
    assert (f" at {path} (a " in str(caught.value)) if path else (" at " not in str(caught.value))


def test_encode_call_names_the_argument() -> None:
    lock = threading.Lock()

    text = r"argument 'batch' of add\(\).* at batch\[0\] \(a _thread.lock\); a lock works in one process"
    with pytest.raises(TypeError, match=text):
        Encoder().encode_call((1, [lock]), {}, endpoint="add", names=("by", "batch"))
    with pytest.raises(TypeError, match=r"argument 'key' of add\(\)"):
        Encoder().encode_call((1,), {"key": lock}, endpoint="add", names=("by",))
    with pytest.raises(TypeError, match=r"argument 2 of add\(\)"):
        Encoder().encode_call((1, 2, lock), {}, endpoint="add", names=("by",))


def test_encode_call_arrives_as_args_and_kwargs() -> None:
    encoded = Encoder().encode_call((1, "a"), {"k": 2.5}, endpoint="add")

    assert Decoder().decode(encoded.payload) == ((1, "a"), {"k": 2.5})


def test_decode_error_keeps_the_cause() -> None:
    encoded = Encoder().encode(Exploding(), what="the value")

    with pytest.raises(
        PayloadError, match=r"the result of f\(\) arrived but cannot be rebuilt.*no such thing here"
    ) as caught:
        Decoder().decode(encoded.payload, what="the result of f()")

    assert isinstance(caught.value.__cause__, LookupError)


@given(st.binary(max_size=200))
def test_decode_of_bytes_that_are_no_pickle_is_a_payload_error(junk: bytes) -> None:
    # Three bytes at the front make every stream fail before an opcode could name anything to run.
    with pytest.raises(PayloadError):
        Decoder().decode(b"\xff\xff\xff" + junk)


@given(st.data())
def test_decode_of_a_broken_trailer_is_a_payload_error_or_a_value(data: st.DataObject) -> None:
    parts = [pickle.PickleBuffer(bytearray(size)) for size in (5000, 3, 70)]
    encoded = Encoder().encode(parts, what="a")
    payload = bytearray(encoded.payload)
    stream = payload.index(pickle.STOP) + 1
    position = data.draw(st.integers(len(payload) - 200, len(payload) - 1).filter(lambda p: p > stream))
    payload[position] = data.draw(st.integers(0, 255))

    try:
        Decoder().decode(bytes(payload), received(encoded))
    except PayloadError:
        pass


def test_decode_with_missing_bodies_is_a_payload_error() -> None:
    encoded = Encoder().encode([memoryview(bytes(5000)), memoryview(b"abc")], what="a")

    with pytest.raises(PayloadError, match="one of its 0 bodies, got 1"):
        Decoder().decode(encoded.payload, [])


BIG = limits.BUFFER_INLINE_BYTES

# ---- buffers ---------------------------------------------------------------------------------------------


def test_bytes_and_bytearray_arrive_as_themselves() -> None:
    """V1."""
    for value in (b"abc" * BIG, bytearray(b"abc" * BIG)):
        arrived = round_trip(value)

        assert type(arrived) is type(value)
        assert arrived == value


@rows(
    "view",
    [
        memoryview(b"abcdef"),
        memoryview(bytearray(b"abcd" * BIG)),
        memoryview(b"abcdef")[::-2],
        memoryview(bytes(96)).cast("d", (3, 4)),
        memoryview(bytes(96)).cast("q", (3, 4))[1:],
        memoryview(b""),
        memoryview(bytes(8)).cast("d", ()),
    ],
)
def test_memoryview_arrives_read_only(view: memoryview) -> None:
    """V1."""
    arrived = round_trip(view)

    assert isinstance(arrived, memoryview)
    assert arrived.readonly
    assert (arrived.format, arrived.shape) == (view.format, view.shape)
    assert arrived.tobytes() == view.tobytes()


def test_memoryview_of_a_strange_format_is_refused() -> None:
    with pytest.raises(TypeError, match=r"send the object that it views"):
        Encoder().encode(memoryview((ctypes.c_int32 * 2)()), what="a")


def test_pickle_buffer_of_a_third_party_travels_beside() -> None:
    encoded = Encoder().encode(pickle.PickleBuffer(bytearray(b"x" * BIG)), what="a")

    assert encoded.buffers[0].nbytes == BIG
    assert bytes(Decoder().decode(encoded.payload, received(encoded))) == b"x" * BIG


# ---- exceptions as values --------------------------------------------------------------------------------


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OwnWay(Exception):
    def __reduce__(self) -> Any:
        return (str, ("its own way",))


def test_exception_in_a_value_arrives_without_its_constructor() -> None:
    """X2."""
    error = KeywordOnly(code=3)
    error.add_note("a note")
    error.__cause__ = RemoteTraceback("text")

    [arrived], again = round_trip(([error], error))

    assert type(arrived) is KeywordOnly
    assert arrived is again
    assert (arrived.code, arrived.args, arrived.__notes__) == (3, ("code 3",), ["a note"])
    assert str(arrived.__cause__) == str(error.__cause__)


def test_group_in_a_value_arrives() -> None:
    """X2."""
    arrived = round_trip([ExceptionGroup("g", [KeywordOnly(code=3), OSError(2, "no", "f.txt")])])[0]

    assert repr(arrived) == repr(ExceptionGroup("g", [KeywordOnly(code=3), FileNotFoundError(2, "no")]))
    assert arrived.exceptions[1].filename == "f.txt"


def test_cause_that_does_not_travel_stays_behind() -> None:
    error = ValueError("x")
    error.__cause__ = ValueError(threading.Lock())

    assert round_trip(error).args == ("x",)


def test_exception_that_says_how_it_pickles_is_left_to_it() -> None:
    assert round_trip([OwnWay()]) == ["its own way"]


def test_exception_that_holds_itself_arrives() -> None:
    error: Any = ValueError("x")
    error.me = [error]

    arrived = round_trip(error)

    assert arrived.me[0] is arrived


# ---- reducers of one encoder -----------------------------------------------------------------------------


class Handle:
    """Something of which the receiving process has its own."""

    def __init__(self, name: str) -> None:
        self.name = name


class Derived(Handle):
    pass


def own_handle(name: str) -> Handle:
    raise TypeError(f"{name} can be had only from a decoder")


def reduce_handle(handle: Handle, sink: Sink) -> Any:
    if handle.name == "plain":
        return NotImplemented
    sink.attach(handle)
    return own_handle, (handle.name,)


def test_own_reducer_is_resolved_by_the_bindings_of_the_decoder() -> None:
    encoder = Encoder(reducers={Handle: reduce_handle})
    made = {"a": Handle("a"), "b": Handle("b")}
    decoder = Decoder(bindings={(__name__, "own_handle"): made.__getitem__})
    a, b = Handle("a"), Derived("b")

    encoded = encoder.encode([a, b, a], what="v")

    assert encoded.attachments == (a, b)
    assert decoder.decode(encoded.payload) == [made["a"], made["b"], made["a"]]
    with pytest.raises(PayloadError, match="only from a decoder"):
        Decoder().decode(encoded.payload)


def test_own_reducer_may_leave_an_object_to_pickle() -> None:
    encoded = Encoder(reducers={Handle: reduce_handle}).encode(Handle("plain"), what="v")

    assert encoded.attachments == ()
    assert Decoder().decode(encoded.payload).name == "plain"


def test_registered_reducer_is_found_by_name_by_class_and_for_subclasses() -> None:
    class Named:
        pass

    class Exact:
        pass

    class Sub(Exact):
        pass

    def reduce(_: Any, __: Sink) -> Any:
        return (str, ("reduced",))

    encoder = Encoder()
    with pytest.raises(TypeError):
        encoder.encode(Named(), what="v")
    register_reducer(f"{__name__}.{Named.__qualname__}", reduce, subclasses=True)
    register_reducer(Exact, reduce)

    def arrived(value: Any) -> Any:
        return Decoder().decode(encoder.encode(value, what="v").payload)

    assert arrived(Named()) == arrived(Exact()) == arrived(type("Below", (Named,), {})()) == "reduced"
    with pytest.raises(TypeError):
        encoder.encode(Sub(), what="v")


def test_classes_that_come_and_go_do_not_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REDUCER_CACHE_CLASSES", 10)
    encoder = Encoder()

    for _ in range(50):
        with pytest.raises(TypeError):
            encoder.encode(type("Short", (), {})(), what="v")

    assert len(encoder._table.found) < 20


# ---- what the text of an error says ----------------------------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Flaky:
    failed = False

    def __reduce__(self) -> Any:
        if not type(self).failed:
            type(self).failed = True
            raise RuntimeError("only once")
        return (int, (3,))


def text_of(value: Any) -> str:
    with pytest.raises(TypeError) as caught:
        Encoder().encode(value, what="v")
    return str(caught.value)


def test_text_names_keys_members_and_slots() -> None:
    lock = threading.Lock()

    assert " at key <unlocked" in text_of({lock: 1})
    assert " at [<Unprintable>] " in text_of({Unprintable(): lock})
    assert " at [3][0] " in text_of({1: 2, 3: (lock,)})
    assert " at [" + "'" + "x" * 56 + "...] " in text_of({"x" * 100: lock})
    assert " at member <unlocked" in text_of({"a", lock})
    assert " at inner.inner (" in text_of(Slotted(Slotted(lock)))


def test_text_is_short_and_says_what_kind_of_error_it_was() -> None:
    class Long:
        def __reduce__(self) -> Any:
            raise ValueError("x" * 10_000)

    text = text_of([Long()])

    assert "ValueError: xxx" in text
    assert len(text) < 600


def test_value_that_holds_itself_is_named() -> None:
    value: dict[str, Any] = {"lock": threading.Lock()}
    value["self"] = value

    assert "['lock']" in text_of(value) or "['self']" in text_of(value)


def test_search_for_the_part_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIAGNOSIS_OBJECTS", 5)

    assert " at " not in text_of([*range(100), threading.Lock()])
    assert " at [2] " in text_of([0, 1, threading.Lock()])


def test_call_whose_arguments_all_encode_by_themselves_raises_all_the_same() -> None:
    with pytest.raises(TypeError, match=r"the arguments of f\(\)"):
        Encoder().encode_call((Flaky(),), {"k": 1}, endpoint="f")


def test_keyboard_interrupt_while_encoding_passes() -> None:
    class Interrupting:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    encoder = Encoder()
    with pytest.raises(KeyboardInterrupt):
        encoder.encode([1, Interrupting()], what="v")

    assert Decoder().decode(encoder.encode([1], what="v").payload) == [1]
