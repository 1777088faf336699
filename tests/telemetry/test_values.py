"""Numbers of other libraries as values of metrics (Q13)."""

from __future__ import annotations

import pytest

import trimesh

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

pytestmark = pytest.mark.torch


def test_arrays_of_one_element_count_as_numbers_unless_reading_them_waits():
    """Q13: a tensor on a device is refused, as `item` waits for the device."""
    trimesh.log({"t": torch.tensor(0.5, requires_grad=True), "n": numpy.float32(2), "a": numpy.ones(1)})
    with pytest.raises(TypeError, match="got 3 elements for 'many'"):
        trimesh.log({"many": torch.ones(3)})
    with pytest.raises(TypeError, match="got a tensor on meta for 'far': reading it waits"):
        trimesh.log({"far": torch.ones((), device="meta")})
