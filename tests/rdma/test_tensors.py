"""Tensors and arrays as users have them: published, read as they were, refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trimesh import Actor, endpoint, this_host
from trimesh.rdma import Published

torch = pytest.importorskip("torch", reason="torch is an extra")
numpy = pytest.importorskip("numpy", reason="numpy is no dependency")

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def threads_of_torch() -> None:
    """Start the threads that torch keeps, before a test is looked at for what it leaves behind."""
    torch.ones(1, requires_grad=True).sum().backward()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
    torch.nn.BatchNorm1d(3)(torch.randn(4, 3))


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


async def test_module_that_follows_keeps_its_tensors() -> None:
    """API 7: what refers to them (an optimizer, a hook, a compiled function) has the new values; types are cast."""
    trained = torch.nn.BatchNorm1d(3)
    async with this_host().spawn_procs({"procs": 1}), Published() as weights:
        model = torch.nn.BatchNorm1d(3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
        following = weights.follow(model)
        for version in 1, 2:
            with torch.no_grad():
                trained.weight.fill_(version)
            trained(torch.randn(4, 3))
            await weights.publish(trained.state_dict())
            assert await anext(following) == version
            assert torch.equal(model.weight, trained.weight.to(torch.bfloat16))
            assert torch.equal(model.running_mean, trained.running_mean.to(torch.bfloat16))
            assert model.num_batches_tracked == version
        assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
        assert model.weight.requires_grad
        model.weight.sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, torch.ones(3, dtype=torch.bfloat16))


async def test_backward_over_weights_that_were_taken_over_is_refused() -> None:
    async with this_host().spawn_procs({"procs": 1}), Published() as weights:
        await weights.publish({"weight": torch.ones(2, 2)})
        layer = torch.nn.Linear(2, 2, bias=False)
        loss = layer(layer(torch.ones(1, 2))).sum()
        assert await anext(weights.follow(layer)) == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


async def test_module_that_does_not_fit_is_not_changed() -> None:
    async with this_host().spawn_procs({"procs": 1}), Published() as weights:
        await weights.publish({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
        for wrong in (
            torch.nn.Linear(4, 2),
            torch.nn.Linear(3, 2, device="meta"),
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(2, dtype=torch.int64)},
        ):
            with pytest.raises(ValueError, match=r"must have the shape|must be able to hold"):
                await anext(weights.follow(wrong))
        assert torch.equal(wrong["weight"], torch.zeros(2, 3))
        with torch.inference_mode():
            made_there = torch.nn.Linear(3, 2)
        strided = {"weight": torch.zeros(3, 2).T, "bias": torch.ones(2, requires_grad=True)}
        for right in made_there, strided:
            assert await anext(weights.follow(right)) == 1
        assert torch.equal(strided["weight"], made_there.weight)
        assert not strided["bias"].any()


class Generator(Actor):
    """Follows weights in the background, and computes with them."""

    def __init__(self, weights: Published) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
        self.weights = weights
        self.version = 0
        self.passes = 0
        self.mixed = 0

    @endpoint
    async def follow(self, last: int) -> None:
        async for version in self.weights.follow(self.model):
            self.version = version
            if version == last:
                return

    @endpoint(group="forward")
    async def forward(self) -> int:
        """Compute; the tensors of a version all hold its number, so a pass with two of them would show.

        Returns how often that was done.
        """
        if self.version:
            self.passes += 1
            self.mixed += len({float(tensor.detach().flatten()[-1]) for tensor in self.model.parameters()}) > 1
        return self.passes

    @endpoint(group="forward")
    async def versions_mixed(self) -> int:
        return self.mixed


async def test_forward_beside_a_follower_never_has_two_versions() -> None:
    """FO-1, over processes; each tensor of a version holds its number."""
    versions = 30
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    async with this_host().spawn_procs({"procs": 1}) as procs, Published() as weights:
        generator = await procs.spawn("generator", Generator, weights)
        has_computed = trio.Event()
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                await generator.follow.call_one(versions)
                nursery.cancel_scope.cancel()

            async def compute() -> None:
                while True:
                    if await generator.forward.call_one():
                        has_computed.set()

            nursery.start_soon(follow)
            nursery.start_soon(compute)
            for version in range(1, versions + 1):
                with torch.no_grad():
                    for tensor in model.parameters():
                        tensor.fill_(version)
                await weights.publish(model.state_dict())
                await has_computed.wait()  # a follower may skip all versions but the last, and is done then
            await trio.sleep_forever()
        assert await generator.versions_mixed.call_one() == 0
