"""What users hand over as memory (API 7): what it may be, where it lies, what is refused."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import pytest
from tests.rows import rows

from trimesh._wire.memory import memory_at
from trimesh.rdma.memory.local import memory_of

numpy = pytest.importorskip("numpy")
WHAT = "the memory of a test"


def content(data: Any) -> bytes:
    found = memory_of(data, WHAT)
    return bytes(memory_at(found.span.address, found.nbytes, found.span.keep))


@rows(
    ("data", "is_writable"),
    [
        (bytearray(b"abcdefgh"), True),
        (b"abcdefgh", False),
        (memoryview(bytearray(b"abcdefgh")), True),
        (memoryview(b"abcdefgh"), False),
        (memoryview(bytearray(b"xxabcdefghxx"))[2:-2], True),
        (memoryview(bytearray(b"abcdefgh")).cast("I"), True),
        (memoryview(bytearray(b"abcdefgh")).cast("H", (2, 2)), True),
        (array.array("q", b"abcdefgh"), True),
        ((ctypes.c_char * 8)(*b"abcdefgh"), True),
        (numpy.frombuffer(bytearray(b"abcdefgh"), numpy.int16), True),
        (numpy.frombuffer(b"abcdefgh", numpy.int16), False),
        (numpy.frombuffer(bytearray(b"xxxxabcdefgh"), numpy.int32)[1:].reshape(1, 2, 1), True),
    ],
)
def test_memory_is_where_it_lies(data: Any, is_writable: bool):
    assert content(data) == b"abcdefgh"
    assert memory_of(data, WHAT).is_writable is is_writable


def test_memory_of_a_mapping():
    with mmap.mmap(-1, 8) as pages:
        pages[:] = b"abcdefgh"
        assert content(pages) == b"abcdefgh"


def test_memory_is_kept_as_it_is():
    """A bytearray whose memory others may reach cannot be made smaller or larger."""
    data = bytearray(8)
    found = memory_of(data, WHAT)
    with pytest.raises(BufferError):
        data.append(1)
    del found
    data.append(1)


@rows(
    ("data", "kind", "text"),
    [
        (7, TypeError, "got 7"),
        ("text", TypeError, "a torch tensor, a numpy array, or a memoryview or bytearray"),
        ([1, 2], TypeError, "numpy array"),
        (numpy.array([None]), TypeError, "references to objects are valid in one process only"),
        (bytearray(), ValueError, "at least one byte"),
        (numpy.empty((0, 4)), ValueError, "at least one byte"),
        (memoryview(bytearray(8))[::2], ValueError, "contiguous"),
        (numpy.zeros((4, 4))[:, 1], ValueError, "ascontiguousarray"),
        (numpy.zeros((4, 4)).T, ValueError, "ascontiguousarray"),
    ],
)
def test_other_things_are_refused(data: Any, kind: type[Exception], text: str):
    """The text says what it was to be, and what came."""
    with pytest.raises(kind, match=text) as caught:
        memory_of(data, WHAT)
    assert WHAT in str(caught.value)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_memory_of_tensors():
    import torch

    whole = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    assert content(whole) == numpy.arange(12, dtype=numpy.int16).tobytes()
    assert content(whole[1:]) == numpy.arange(4, 12, dtype=numpy.int16).tobytes()
    parameter = torch.nn.Parameter(torch.ones(2))
    assert content(parameter) == numpy.ones(2, numpy.float32).tobytes()
    assert content(torch.ones(3, dtype=torch.bfloat16)) == b"\x80\x3f" * 3


@pytest.mark.torch
def test_memory_of_a_tensor_outlives_it():
    import torch

    found = memory_of(torch.full((1 << 12,), 7, dtype=torch.uint8), WHAT)
    others = [torch.zeros(1 << 12, dtype=torch.uint8) for _ in range(8)]
    assert bytes(memory_at(found.span.address, 4, found.span.keep)) == b"\x07" * 4
    del others


@pytest.mark.torch
@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("torch.zeros(4, 4).t()", "contiguous"),
        ("torch.zeros(4, 4)[:, 0]", "contiguous"),
        ("torch.zeros(1).expand(4)", "contiguous"),
        ("torch.zeros(0)", "at least one byte"),
        ("torch.zeros(2, device='meta')", "cpu or cuda"),
        ("torch.zeros(2, dtype=torch.complex64).conj()", "resolve_conj"),
        ("torch.zeros(2, 2).to_sparse()", "strided"),
        ("torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)", "strided"),
    ],
)
def test_other_tensors_are_refused(make: str, text: str):
    import torch

    with pytest.raises(ValueError, match=text):
        memory_of(eval(make, {"torch": torch}), WHAT)


@pytest.mark.torch
def test_tensor_without_memory_is_refused():
    """A class that only wraps others, as a tensor on a mesh does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        import torch

        fake = torch.zeros(4)
    del mode
    with pytest.raises(ValueError, match="memory of its own"):
        memory_of(fake, WHAT)
