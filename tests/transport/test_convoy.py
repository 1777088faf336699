"""Large messages that go in parts: what is sent is what arrives, and nothing that a peer says is believed."""

from __future__ import annotations

import struct

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh import limits
from trimesh._transport.arrivals import Arrival, Arrivals
from trimesh._transport.assembly import AssemblyError
from trimesh._transport.convoy import IMMUTABLE, PART, Convoy, goes_in_parts, is_immutable
from trimesh.errors import LimitExceeded

LARGE = limits.PARTED_BYTES_MIN


@attrs.define
class Done:
    times: int = 0

    def part_done(self) -> None:
        self.times += 1


def take(arrivals: Arrivals, head: bytes, bodies) -> Arrival | None:
    return arrivals.take(memoryview(head), [memoryview(bytes(body)) for body in bodies])


@given(
    head=st.binary(max_size=20),
    bodies=st.lists(st.one_of(st.binary(max_size=50), st.binary(max_size=50).map(bytearray)), max_size=6),
    part_bytes=st.integers(1, 40),
)
def test_message_arrives_whole_and_leaves_once(head: bytes, bodies: list[bytes | bytearray], part_bytes: int):
    done = Done()
    convoy = Convoy(head, bodies, 7, done)
    convoy.number = 3
    arrivals = Arrivals()
    arrival = None

    while not convoy.is_out:
        assert arrival is None
        part_head, pieces = convoy.next_part(part_bytes)
        arrival = take(arrivals, part_head, pieces)
        assert done.times == 0
        convoy.part_done()

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
    convoy = Convoy(b"", [bytes(100)], 7, done)
    convoy.next_part(10)

    convoy.finish()
    convoy.part_done()
    convoy.finish()

    assert done.times == 1


def test_bodies_may_be_any_contiguous_buffer():
    grid = memoryview(bytes(range(12))).cast("B", (3, 4))
    convoy = Convoy(b"", [grid, memoryview(b"")], 7, Done())
    arrivals = Arrivals()
    assert take(arrivals, *convoy.next_part(100)) is None

    arrival = take(arrivals, *convoy.next_part(100))

    assert arrival is not None
    assert [bytes(body) for body in arrival.bodies()] == [bytes(range(12)), b""]


@pytest.mark.parametrize(
    ("head", "bodies"), [(bytes(limits.HEAD_BYTES_MAX + 1), [b""]), (b"", [b""] * (limits.BODIES_MAX + 1))]
)
def test_what_no_link_takes_is_refused(head: bytes, bodies: list[bytes]):
    with pytest.raises(LimitExceeded):
        Convoy(head, bodies, 7, Done())


def test_bytes_and_views_of_them_are_immutable():
    data = b"data"
    assert is_immutable(data)
    assert is_immutable(memoryview(data)[1:])
    assert not is_immutable(bytearray(data))
    assert not is_immutable(memoryview(bytearray(data)).toreadonly())


@pytest.mark.parametrize(
    ("bodies", "local", "shared", "parts"),
    [
        ([bytes(LARGE)], True, False, True),
        ([bytes(LARGE)], True, True, False),
        ([bytes(LARGE)], False, True, True),
        ([bytearray(LARGE)], True, False, False),
        ([bytearray(LARGE)], False, False, True),
        ([bytes(LARGE), bytearray(2 * LARGE)], True, False, False),
        ([bytes(LARGE - 1)], False, False, False),
        ([], False, False, False),
        ([memoryview(bytearray(1)), b""], True, False, False),
    ],
)
def test_who_goes_in_parts(bodies: list[bytes | bytearray], local: bool, shared: bool, parts: bool):
    assert goes_in_parts(bodies, local=local, shared=shared) is parts


# ---- foreign parts ---------------------------------------------------------------------------------------------------


def first(*words: int, head: bytes = b"") -> tuple[bytes, list[bytes]]:
    return PART.pack(1, 1), [struct.pack(f"<{len(words)}Q", *words), head]


def next_part(*pieces: bytes) -> tuple[bytes, list[bytes]]:
    return PART.pack(1, 0), list(pieces)


@pytest.mark.parametrize(
    "parts",
    [
        [(b"", [b"x"])],
        [next_part(b"x")],
        [first(2), first(2)],
        [first(2), next_part(b"xyz")],
        [first(1), next_part(b"x"), next_part(b"x")],
        [(PART.pack(1, 1), [b"1234567", b""])],
        [(PART.pack(1, 1), [b"12345678"])],
        [(PART.pack(1, 1), [bytes(8 * limits.BODIES_MAX + 8), b""])],
        [first(2, head=bytes(limits.HEAD_BYTES_MAX + 1))],
        [first(limits.MESSAGE_BYTES_MAX, 1)],
        [first((1 << 63) - 1)],
        [first(IMMUTABLE | ((1 << 63) - 1))],
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[tuple[bytes, list[bytes]]]):
    arrivals = Arrivals()

    with pytest.raises(AssemblyError):
        for head, bodies in parts:
            take(arrivals, head, bodies)


def test_too_many_messages_at_one_time_are_refused():
    arrivals = Arrivals()
    for number in range(limits.PARTED_MAX):
        assert take(arrivals, PART.pack(number, 1), [struct.pack("<Q", 1), b""]) is None

    with pytest.raises(AssemblyError):
        take(arrivals, PART.pack(limits.PARTED_MAX, 1), [struct.pack("<Q", 1), b""])


@given(
    st.lists(
        st.tuples(
            st.one_of(st.builds(PART.pack, st.integers(0, 2), st.integers(0, 1)), st.binary(max_size=6)),
            st.lists(
                st.one_of(st.binary(max_size=16), st.builds(lambda n: struct.pack("<Q", n), st.integers(0, 40))),
                max_size=3,
            ),
        ),
        max_size=20,
    )
)
def test_no_parts_raise_anything_else(parts: list[tuple[bytes, list[bytes]]]):
    arrivals = Arrivals()
    for head, bodies in parts:
        try:
            arrival = take(arrivals, head, bodies)
        except AssemblyError:
            break
        if arrival is not None:
            assert sum(body.nbytes for body in arrival.bodies()) <= 3 * 40 * 20
