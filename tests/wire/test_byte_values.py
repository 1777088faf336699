"""Bytes that are the value itself, or an argument of a call, travel beside the pickle."""

from __future__ import annotations

import pickle

import pytest
from tests.rows import rows
from tests.wire.sides import side

from trimesh import limits
from trimesh._wire.memory import copied_bytes, new_bytes, new_pages
from trimesh._wire.pickled.payload import Decoder, Encoder

ALONE = limits.BYTES_ALONE_MIN
LARGE = limits.BYTES_BESIDE_MIN


def contents(size: int) -> bytes:
    return bytes(i % 251 for i in range(4096)) * (size // 4096 + 1)


def arrived(encoded, *, as_bytes: bool = False):
    bodies = [memoryview(bytes(b) if as_bytes else bytearray(b)) for b in encoded.buffers]
    return Decoder().decode(encoded.payload, bodies)


@rows("cls", [bytes, bytearray])
@rows("size", [0, 1, ALONE - 1, ALONE, LARGE - 1, LARGE, LARGE + 1, limits.HUGE_PAGES_BYTES_MIN + 17])
def test_value_arrives_as_what_it_was(cls: type, size: int):
    value = cls(contents(size)[:size])
    here, there = side("here", 1), side("there", 2)

    found = here.send(value, there)

    assert type(found) is cls
    assert found == value


@pytest.mark.parametrize("size", [ALONE, LARGE])
def test_large_value_is_lent_and_not_copied(size: int):
    value = contents(size)

    encoded = Encoder().encode(value, what="it")

    assert len(encoded.payload) < 200
    assert pickle.loads(encoded.payload, buffers=encoded.buffers) is value
    assert [body.obj for body in encoded.buffers] == [value]
    assert encoded.buffers[0].obj is value


def test_bytes_that_a_transport_has_made_are_handed_out_as_they_are():
    body = contents(LARGE)
    encoded = Encoder().encode(body, what="it")

    found = Decoder().decode(encoded.payload, [memoryview(body)])

    assert found is body


def test_part_of_other_bytes_is_copied():
    whole = contents(2 * LARGE)
    encoded = Encoder().encode(whole[:LARGE], what="it")

    assert Decoder().decode(encoded.payload, [memoryview(whole)[:LARGE]]) == whole[:LARGE]


def test_arguments_of_a_call_arrive_as_what_they_were():
    args = (1, contents(LARGE), bytearray(contents(LARGE)), memoryview(contents(LARGE)), "text")
    kwargs = {"data": contents(LARGE + 1), "small": b"small"}

    encoded = Encoder().encode_call(args, kwargs, endpoint="f")

    assert len(encoded.buffers) == 4
    found = arrived(encoded)
    assert found == (args, kwargs)
    assert [type(one) for one in found[0]] == [int, bytes, bytearray, memoryview, str]
    assert found[0][3].readonly


def test_bytes_among_arguments_that_hold_nothing_arrive_as_they_were():
    data = contents(LARGE)
    args = (1, data, "text", b"small", data, None, contents(LARGE + 1))

    encoded = Encoder().encode_call(args, {}, endpoint="f")

    assert len(encoded.buffers) == 2
    found, kwargs = arrived(encoded)
    assert (found, kwargs) == (args, {})
    assert found[1] is found[4]


@pytest.mark.parametrize("size", [0, ALONE - 1, ALONE, ALONE + 1, LARGE])
def test_only_argument_arrives_as_what_it_was(size: int):
    encoded = Encoder().encode_call((contents(size)[:size],), {}, endpoint="f")

    assert len(encoded.buffers) == (size >= ALONE)
    assert arrived(encoded) == ((contents(size)[:size],), {})


def test_only_argument_is_read_whether_its_pickle_is_known_or_not():
    encoded = Encoder().encode_call((contents(ALONE),), {}, endpoint="f")

    assert pickle.loads(encoded.payload, buffers=encoded.buffers) == ((contents(ALONE),), {})


def test_bytearray_that_another_argument_refers_to_stays_one_object():
    data = bytearray(contents(LARGE))

    first, (second,) = arrived(Encoder().encode_call((data, [data]), {}, endpoint="f"))[0]

    assert first is second


@pytest.mark.parametrize("cls", [bytes, bytearray])
def test_argument_that_is_given_twice_is_sent_once(cls: type):
    data = cls(contents(LARGE))

    encoded = Encoder().encode_call((data,), {"again": data}, endpoint="f")

    assert len(encoded.buffers) == 1
    (first,), kwargs = arrived(encoded)
    assert first is kwargs["again"]


def test_bytearray_can_grow_after_its_message_is_gone():
    found = arrived(Encoder().encode(bytearray(contents(LARGE)), what="it"))

    found.append(1)

    assert found[-1] == 1


def test_arguments_that_cannot_be_sent_are_named_beside_large_ones():
    with pytest.raises(TypeError, match="argument 'fn' of f"):
        Encoder().encode_call((contents(LARGE), lambda: 0), {}, endpoint="f", names=["data", "fn"])


def test_new_bytes_are_bytes_once_they_are_filled():
    size = limits.HUGE_PAGES_BYTES_MIN + 3
    fresh, memory = new_bytes(size)

    memory[:] = contents(size)[:size]

    assert fresh == contents(size)[:size]
    assert hash(fresh) == hash(contents(size)[:size])


@pytest.mark.parametrize("size", [1, limits.HUGE_PAGES_BYTES_MIN])
def test_new_pages_are_zero_and_writable(size: int):
    with new_pages(size) as pages:
        assert pages[size - 1] == 0
        pages[size - 1] = 1


def test_memory_that_cannot_be_is_refused():
    with pytest.raises((MemoryError, OverflowError, OSError, ValueError)):
        new_pages(1 << 62)
    with pytest.raises(MemoryError):
        new_bytes(1 << 62)


@pytest.mark.parametrize("size", [0, 1, limits.HUGE_PAGES_BYTES_MIN])
def test_view_is_copied_whole(size: int):
    assert copied_bytes(memoryview(bytearray(contents(size)[:size]))) == contents(size)[:size]
