"""torch may be installed without numpy."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.torch]


def test_bytes_of_a_tensor_are_had_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimesh.tensor.controller.upload import bytes_of

    def numpy(_: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)

    assert bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T) == b"\1\3\2\4"
    assert bytes_of(torch.empty(0)) == b""
    assert bytes_of(torch.tensor([1.0]).requires_grad_()) == b"\0\0\x80?"
