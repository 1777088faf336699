"""Arrays beside the pickle: writable, private, shared where they were (rule V1)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from tests.rows import rows

from trimesh import limits
from trimesh._wire.pickled.payload import Decoder, Encoded, Encoder

np = pytest.importorskip("numpy", reason="these are values of numpy, which is no dependency")

BIG = limits.BUFFER_INLINE_BYTES


def received(encoded: Encoded) -> list[memoryview]:
    """Return the bodies as a transport hands them over: writable and private."""
    return [memoryview(bytearray(buffer)) for buffer in encoded.buffers]


def round_trip(value: Any) -> Any:
    encoded = Encoder().encode(value, what="the value")
    return Decoder().decode(encoded.payload, received(encoded))


arrays: dict[str, Callable[[], Any]] = {
    "small": lambda: np.arange(5),
    "large": lambda: np.arange(BIG),
    "scalar": lambda: np.array(3.5),
    "empty": lambda: np.zeros((0, 3)),
    "fortran": lambda: np.asfortranarray(np.arange(12.0 * BIG).reshape(3, -1)),
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "strided": lambda: np.arange(BIG)[::2],
    "sparse": lambda: np.arange(16 * BIG).reshape(-1, 16)[:, 3],
    "reversed": lambda: np.arange(BIG)[::-1],
    "reversed_2d": lambda: np.arange(64 * 64).reshape(64, 64)[::-2, ::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (5, 3)),
    "window": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(1000), 10),
    "datetime": lambda: np.array(["2020-01-01", "2021-02-03"], dtype="M8[D]"),
    "complex": lambda: np.arange(6) * 1j,
    "half": lambda: np.arange(6, dtype=np.float16),
    "bool": lambda: np.array([True, False]),
    "text": lambda: np.array(["a", "bcd"]),
    "big_endian": lambda: np.arange(6, dtype=">i4"),
    "record": lambda: np.zeros(4, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "object": lambda: np.array([1, "a", None], dtype=object),
    "read_only": lambda: np.frombuffer(b"x" * BIG, dtype=np.uint8),
    "matrix": lambda: np.arange(6).reshape(2, 3).view(np.recarray),
}


@rows("name", arrays)
def test_array_arrives_equal_and_writable(name: str) -> None:
    """V1."""
    array = arrays[name]()

    arrived = round_trip(array)

    assert type(arrived) is type(array)
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    np.testing.assert_array_equal(arrived, array)
    assert arrived.flags.writeable
    arrived[...] = arrived


def test_large_array_is_lent_not_copied() -> None:
    array = np.zeros(BIG)

    encoded = Encoder().encode(array, what="a")
    array[0] = 5.0

    assert [buffer.nbytes for buffer in encoded.buffers] == [array.nbytes]
    assert len(encoded.payload) < 200
    assert Decoder().decode(encoded.payload, received(encoded))[0] == 5.0


def test_buffers_keep_a_temporary_array_alive() -> None:
    encoded = Encoder().encode(np.full(1 << 20, 7, dtype=np.uint8), what="a")

    [np.full(1 << 20, 9, dtype=np.uint8) for _ in range(8)]  # would fall on freed memory

    assert bytes(encoded.buffers[0][:4]) == b"\x07" * 4
    assert Decoder().decode(encoded.payload, received(encoded)).sum() == 7 << 20


def test_small_arrays_ride_in_the_payload() -> None:
    encoded = Encoder().encode([np.arange(10) for _ in range(100)], what="a")

    assert encoded.buffers == ()
    assert [a.tolist() for a in Decoder().decode(encoded.payload)] == [list(range(10))] * 100


def test_more_arrays_than_bodies_are_packed() -> None:
    arrays = [np.full(BIG, n % 251, dtype=np.uint8) for n in range(limits.BODIES_MAX + 50)]

    encoded = Encoder().encode(arrays, what="a")
    arrived = Decoder().decode(encoded.payload, received(encoded))

    assert len(encoded.buffers) < limits.BODIES_MAX
    assert all((a == b).all() for a, b in zip(arrays, arrived, strict=True))


def test_same_array_twice_arrives_as_one_object() -> None:
    array = np.zeros(10)

    a, b = round_trip((array, array))

    assert a is b


@pytest.mark.parametrize("size", [10, BIG])
def test_views_of_one_array_stay_shared(size: int) -> None:
    """V1."""
    base = np.arange(float(2 * size)).reshape(2, size)

    encoded = Encoder().encode((base[0, 3:8], base, base.T, base[:, ::-1], base[1]), what="a")
    part, whole, transposed, backwards, row = Decoder().decode(encoded.payload, received(encoded))
    whole[0, 3] = -1.0
    row[0] = -2.0

    assert encoded.nbytes < base.nbytes + 1000
    assert part[0] == -1.0
    assert transposed[3, 0] == -1.0
    assert backwards[0, size - 4] == -1.0
    assert whole[1, 0] == -2.0


def test_arrays_that_only_touch_stay_apart() -> None:
    base = np.arange(2 * BIG)

    encoded = Encoder().encode((base[:BIG], base[BIG:]), what="a")

    assert [buffer.nbytes for buffer in encoded.buffers] == [base.nbytes // 2] * 2


def test_sparse_view_travels_compacted_when_alone_and_shared_when_not() -> None:
    base = np.arange(100 * BIG).reshape(-1, 100)

    alone = Encoder().encode(base[:, 0], what="a")
    both = Encoder().encode((base[:, 0], base), what="a")
    column, whole = Decoder().decode(both.payload, received(both))
    whole[5, 0] = -1

    assert alone.nbytes < base.nbytes // 50
    assert (Decoder().decode(alone.payload, received(alone)) == base[:, 0]).all()
    assert both.nbytes < base.nbytes + 1000
    assert column[5] == -1


def test_writes_to_an_arrived_array_do_not_reach_the_sender() -> None:
    """V1."""
    array = np.zeros(BIG)

    arrived = round_trip(array)
    arrived[:] = 1

    assert array.sum() == 0


def test_encode_within_does_not_copy_what_is_too_large() -> None:
    array = np.zeros(1 << 28, dtype=np.uint8)

    tracemalloc.start()
    try:
        encoded = Encoder().encode_within(array, 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert encoded is None
    assert peak < 1 << 20


def test_encode_within_puts_buffers_into_the_payload() -> None:
    base = np.arange(3 * BIG)

    encoded = Encoder().encode_within([base, base[5:]], 1 << 20)

    assert encoded is not None
    assert encoded.buffers == ()
    whole, part = Decoder().decode(encoded.payload)
    part[0] = -1
    assert whole[5] == -1
