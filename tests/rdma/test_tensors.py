"""Tensors and arrays as users have them: published, read as they were, refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from trimesh import Actor, endpoint, this_host
from trimesh.rdma import Published

torch = pytest.importorskip("torch", reason="torch is an extra")
numpy = pytest.importorskip("numpy", reason="numpy is no dependency")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def state() -> dict[str, Any]:
    """Return tensors of many kinds."""
    return {
        "float": torch.arange(12.0).view(3, 4),
        "bfloat16": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.full((2, 2), 3.0)),
        "array": numpy.arange(6, dtype=">i4").reshape(2, 3),
        "bytes": b"some",
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two are of one kind, type, shape and value."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    return one == other


class Reader(Actor):
    """Reads what is published."""

    @endpoint
    async def read(self, weights: Published) -> dict[str, Any]:
        async with weights.pin() as snapshot:
            return await snapshot.read()


async def test_state_dict_is_read_as_it_was_published() -> None:
    async with this_host().spawn_procs({"procs": 2}) as procs:
        readers = await procs.spawn("readers", Reader)
        async with Published() as weights:
            await weights.publish(state())
            for found in (await readers.read.call(weights)).values():
                assert list(found) == list(state())
                assert all(same(one, found[name]) for name, one in state().items())


async def test_copy_into_a_model() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(2)
    async with this_host().spawn_procs({"procs": 1}), Published() as weights:
        await weights.publish(model.state_dict())
        other = torch.nn.Linear(3, 2)
        async with weights.pin() as snapshot:
            await snapshot.read_into(other.state_dict())
            assert torch.equal(other.weight, model.weight)
            for wrong in torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 6)[:2, :3]:
                with pytest.raises(ValueError, match=r"as it was published|contiguous"):
                    await snapshot.read_into({"weight": wrong})
        assert torch.equal(other.weight, model.weight)
