"""Large messages that go in chunks: what is sent is what arrives, and nothing that a peer says is believed."""

from __future__ import annotations

import struct

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import limits
from trimesh._transport.interface import Buffer
from trimesh._transport.messages.incoming import Arrival, Arrivals, AssemblyError
from trimesh._transport.messages.outgoing import CHUNK, IMMUTABLE, ChunkedMessage, goes_in_chunks, is_immutable
from trimesh.errors import LimitExceeded

LARGE = limits.CHUNKED_BYTES_MIN
POOLED = memoryview(bytearray(limits.SEGMENT_BYTES_MAX))
"""The largest body that fits a segment."""


@attrs.define
class Done:
    times: int = 0

    def chunk_done(self) -> None:
        self.times += 1


def take(arrivals: Arrivals, head: bytes, bodies) -> Arrival | None:
    return arrivals.take(memoryview(head), [memoryview(bytes(body)) for body in bodies])


@given(
    head=st.binary(max_size=20),
    bodies=st.lists(st.one_of(st.binary(max_size=50), st.binary(max_size=50).map(bytearray)), max_size=6),
    chunk_bytes=st.integers(1, 40),
)
def test_message_arrives_whole_and_leaves_once(head: bytes, bodies: list[bytes | bytearray], chunk_bytes: int):
    done = Done()
    chunked = ChunkedMessage(head, bodies, 7, done)
    chunked.number = 3
    arrivals = Arrivals()
    arrival = None

    while not chunked.is_out:
        assert arrival is None
        chunk_head, pieces = chunked.next_chunk(chunk_bytes)
        arrival = take(arrivals, chunk_head, pieces)
        assert done.times == 0
        chunked.chunk_done()

    assert done.times == 1
    assert arrival is not None
    assert arrival.head == head
    found = arrival.bodies()
    assert [bytes(body) for body in found] == [bytes(body) for body in bodies]
    assert [type(body.obj) is bytes for body in found if body.nbytes] == [
        type(body) is bytes for body in bodies if body
    ]
    assert all(not found_one.readonly for found_one, body in zip(found, bodies, strict=True) if type(body) is bytearray)


def test_message_that_is_given_up_leaves_once():
    done = Done()
    chunked = ChunkedMessage(b"", [bytes(100)], 7, done)
    chunked.next_chunk(10)

    chunked.finish()
    chunked.chunk_done()
    chunked.finish()

    assert done.times == 1


def test_bodies_may_be_any_contiguous_buffer():
    grid = memoryview(bytes(range(12))).cast("B", (3, 4))
    chunked = ChunkedMessage(b"", [grid, memoryview(b"")], 7, Done())
    arrivals = Arrivals()
    assert take(arrivals, *chunked.next_chunk(100)) is None

    arrival = take(arrivals, *chunked.next_chunk(100))

    assert arrival is not None
    assert [bytes(body) for body in arrival.bodies()] == [bytes(range(12)), b""]


@pytest.mark.parametrize(
    ("head", "bodies"), [(bytes(limits.HEAD_BYTES_MAX + 1), [b""]), (b"", [b""] * (limits.BODIES_MAX + 1))]
)
def test_what_no_link_takes_is_refused(head: bytes, bodies: list[bytes]):
    with pytest.raises(LimitExceeded):
        ChunkedMessage(head, bodies, 7, Done())


def test_bytes_and_views_of_them_are_immutable():
    data = b"data"
    assert is_immutable(data)
    assert is_immutable(memoryview(data)[1:])
    assert not is_immutable(bytearray(data))
    assert not is_immutable(memoryview(bytearray(data)).toreadonly())


@rows(
    ("bodies", "local", "shared", "chunks"),
    [
        ([bytes(LARGE)], True, False, True),
        ([bytes(LARGE)], True, True, False),
        ([bytes(LARGE)], False, True, True),
        ([bytearray(LARGE)], True, False, False),
        ([bytearray(LARGE)], False, False, True),
        ([bytes(LARGE), bytearray(2 * LARGE)], True, False, False),
        ([POOLED] * (limits.SEGMENT_IDLE_BYTES_MAX // len(POOLED)), True, False, False),
        ([POOLED] * (limits.SEGMENT_IDLE_BYTES_MAX // len(POOLED) + 1), True, False, True),
        ([POOLED] * (limits.SEGMENT_IDLE_BYTES_MAX // len(POOLED) + 1), True, True, False),
        ([POOLED[: len(POOLED) // 2 + 1]] * (limits.SEGMENT_IDLE_BYTES_MAX // len(POOLED) + 1), True, False, True),
        ([bytes(LARGE - 1)], False, False, False),
        ([], False, False, False),
        ([memoryview(bytearray(1)), b""], True, False, False),
    ],
)
def test_who_goes_in_chunks(bodies: list[Buffer], local: bool, shared: bool, chunks: bool):
    assert goes_in_chunks(bodies, local=local, shared=shared) is chunks


# ---- foreign chunks --------------------------------------------------------------------------------------------------


def first(*words: int, head: bytes = b"") -> tuple[bytes, list[bytes]]:
    return CHUNK.pack(1, 1), [struct.pack(f"<{len(words)}Q", *words), head]


def next_chunk(*pieces: bytes) -> tuple[bytes, list[bytes]]:
    return CHUNK.pack(1, 0), list(pieces)


@rows(
    "chunks",
    [
        [(b"", [b"x"])],
        [next_chunk(b"x")],
        [first(2), first(2)],
        [first(2), next_chunk(b"xyz")],
        [first(1), next_chunk(b"x"), next_chunk(b"x")],
        [(CHUNK.pack(1, 1), [b"1234567", b""])],
        [(CHUNK.pack(1, 1), [b"12345678"])],
        [(CHUNK.pack(1, 1), [bytes(8 * limits.BODIES_MAX + 8), b""])],
        [first(2, head=bytes(limits.HEAD_BYTES_MAX + 1))],
        [first(limits.MESSAGE_BYTES_MAX, 1)],
        [first((1 << 63) - 1)],
        [first(IMMUTABLE | ((1 << 63) - 1))],
    ],
)
def test_chunks_that_do_not_fit_are_refused(chunks: list[tuple[bytes, list[bytes]]]):
    arrivals = Arrivals()

    with pytest.raises(AssemblyError):
        for head, bodies in chunks:
            take(arrivals, head, bodies)


def test_too_many_messages_at_one_time_are_refused():
    arrivals = Arrivals()
    for number in range(limits.CHUNKED_MAX):
        assert take(arrivals, CHUNK.pack(number, 1), [struct.pack("<Q", 1), b""]) is None

    with pytest.raises(AssemblyError):
        take(arrivals, CHUNK.pack(limits.CHUNKED_MAX, 1), [struct.pack("<Q", 1), b""])


@given(
    st.lists(
        st.tuples(
            st.one_of(st.builds(CHUNK.pack, st.integers(0, 2), st.integers(0, 1)), st.binary(max_size=6)),
            st.lists(
                st.one_of(st.binary(max_size=16), st.builds(lambda n: struct.pack("<Q", n), st.integers(0, 40))),
                max_size=3,
            ),
        ),
        max_size=20,
    )
)
def test_no_chunks_raise_anything_else(chunks: list[tuple[bytes, list[bytes]]]):
    arrivals = Arrivals()
    for head, bodies in chunks:
        try:
            arrival = take(arrivals, head, bodies)
        except AssemblyError:
            break
        if arrival is not None:
            assert sum(body.nbytes for body in arrival.bodies()) <= 3 * 40 * 20
