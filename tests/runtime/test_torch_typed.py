"""Tensors where nothing is pickled: as by pickle, they arrive writable, private and sharing what they shared (V1)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rows import rows

from trimesh._runtime.values import codec
from trimesh._wire.typed.known_kinds import TypedDecoder, TypedEncoder
from trimesh.errors import PayloadError, ProtocolError

torch = pytest.importorskip("torch", reason="these are values of torch, which is an extra")
pytestmark = pytest.mark.torch

assert codec  # registers the kinds
torch.zeros(1 << 20).add_(1)  # starts torch's threads, which no test is to answer for


def through(value: Any) -> Any:
    encoded = TypedEncoder().encode(value, what="a value")
    return TypedDecoder().decode(encoded.payload, [memoryview(bytearray(one)) for one in encoded.buffers])


@rows(
    "make",
    [
        lambda: torch.arange(10),
        lambda: torch.randn(300, 300),
        lambda: torch.randn(300, 300).t(),
        lambda: torch.randn(300, 300)[:, 3],
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(2.5, dtype=torch.bfloat16),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    ],
)
def test_tensor_arrives_equal_and_private(make: Any):
    tensor = make()

    found = through(tensor)

    assert type(found) is type(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    if found.numel():
        before = tensor.clone()
        found.zero_()
        assert torch.equal(tensor, before)


def test_storage_of_two_tensors_stays_shared():
    whole = torch.zeros(10_000)

    first, second = through((whole, whole[:5]))

    first[0] = 7
    assert second[0] == 7


def test_sparse_tensor_is_refused():
    with pytest.raises(TypeError, match="must be dense"):
        through(torch.eye(3).to_sparse())


@pytest.mark.parametrize("name", ["nn", "load", 3, "no_such_dtype"])
def test_forged_dtype_is_refused(name: Any):
    from trimesh._wire.typed.codec import KIND, Writer

    writer = Writer()
    payload = writer.finish(writer._encode(writer._ext(KIND, ["tensor", name, None, None, [1], [1], 0])))
    with pytest.raises((ProtocolError, PayloadError)):
        TypedDecoder().decode(payload.payload)
