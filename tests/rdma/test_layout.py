"""Where published tensors lie, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from tests.rows import rows

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.rdma.publications.board import ALIGN_BYTES, TensorEntry, layout_of, read_layout


@pytest.mark.parametrize("others", [0, 1, 2, 200])
def test_tensors_lie_apart_after_the_layout(others: int) -> None:
    tensors = {"a": b"12345", "b": memoryview(bytearray(48)).cast("f", (3, 4)), "c" * 200: bytearray(100)}
    tensors |= {str(number): bytearray(1 << 16) for number in range(others)}
    layout = layout_of(tensors)
    entries = read_layout(layout.head, layout.nbytes)
    assert entries == dict(layout.entries)
    assert list(entries) == list(tensors)
    end = len(layout.head)
    for entry in entries.values():
        assert entry.offset >= end
        assert entry.offset % ALIGN_BYTES == 0
        end = entry.offset + entry.nbytes
    assert end == layout.nbytes
    assert (entries["b"].kind, entries["b"].dtype, entries["b"].shape) == ("bytes", "", (48,))


def test_arrays_keep_kind_dtype_and_shape() -> None:
    numpy = pytest.importorskip("numpy")
    [entry] = layout_of({"a": numpy.zeros((3, 4), numpy.float32)}).entries.values()
    assert (entry.kind, entry.dtype, entry.shape, entry.nbytes) == ("numpy", "<f4", (3, 4), 48)
    assert entry.describe() == "<f4 of shape (3, 4)"


def test_tensor_may_follow_the_layout_at_once() -> None:
    entry = TensorEntry("a", "bytes", "", (4,), 15, 4)
    data = msgspec.msgpack.encode([entry])
    assert len(data) == entry.offset
    assert read_layout(data, 19) == {"a": entry}


def test_room_stays_free_after_the_layout() -> None:
    layout = layout_of({"a": b"12345"}, 1000)
    assert layout.entries["a"].offset >= len(layout.head) + 1000
    assert layout.entries == read_layout(layout.head, layout.nbytes)


def test_what_cannot_be_published_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one"):
        layout_of({})
    with pytest.raises(TypeError, match="must be strings"):
        layout_of({1: b"x"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="'a'"):
        layout_of({"a": object()})
    monkeypatch.setattr(limits, "PUBLISHED_TENSORS_MAX", 2)
    assert len(layout_of({"a": b"x", "b": b"y"}).entries) == 2
    with pytest.raises(ValueError, match="at most 2 tensors can be published together, got 3"):
        layout_of({"a": b"x", "b": b"y", "c": b"z"})


@rows(
    "data",
    [
        b"",
        b"\xff",
        b"\x91" * 2000,
        msgspec.msgpack.encode(1),
        msgspec.msgpack.encode([TensorEntry("a", "bytes", "", (4,), 0, 2000)]),
        msgspec.msgpack.encode([TensorEntry("a", "bytes", "", (4,), -1, 4)]),
        msgspec.msgpack.encode([TensorEntry("a", "bytes", "", (4,), 14, 4)]),
        msgspec.msgpack.encode([TensorEntry("a", "bytes", "", (4,), 998, 4)]),
        msgspec.msgpack.encode([TensorEntry("a", "bytes", "", (0,), 4, 0)]),
    ],
)
def test_layout_of_a_peer_is_checked(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_layout(data, 1000)
