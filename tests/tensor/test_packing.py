"""Small tensors as bytes: what comes back of them, and which are not packed."""

from __future__ import annotations

import pytest

from trimesh import limits

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.protocol.arguments import pack, unpack  # noqa: E402

pytestmark = [pytest.mark.torch]


def test_tensors_come_back_as_they_were() -> None:
    values = [
        torch.tensor(2.5),
        torch.arange(3, dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.nn.Parameter(torch.ones(2)),
    ]
    data = pack(values)
    assert data is not None
    found = unpack(data, [(value.size(), value.dtype) for value in values])
    for one, other in zip(found, values, strict=True):
        assert (type(one), one.dtype, one.requires_grad, one._base) == (torch.Tensor, other.dtype, False, None)
        assert torch.equal(one, other)
        assert one.untyped_storage().nbytes() == other.nbytes  # so that `torch.save` writes one row as a row
        one.zero_()  # which is the receiver's own
    assert values[0] == 2.5


def test_other_bytes_than_those_of_the_tensors_are_refused() -> None:
    for size in (1, 3):
        with pytest.raises(ValueError, match=r"."):
            unpack(bytes(8), [((size,), torch.float32)])
    with pytest.raises(ValueError, match="quantized"):
        unpack(bytes(1), [((1,), torch.qint8)])


def test_what_is_more_than_small_row_major_bytes_is_not_packed() -> None:
    class Own(torch.Tensor):
        pass

    for value in (
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).as_subclass(Own),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(limits.HEAD_PAYLOAD_BYTES_MAX, dtype=torch.uint8),
    ):
        assert pack([torch.ones(1), value]) is None
