"""Tensors of CUDA devices, where there is one; `tests/examples` runs whole programs with them."""

from __future__ import annotations

import pytest
from tests.devices import HAS_CUDA

import trimesh
from trimesh import CollectiveFailed, MeshErrorGroup, this_host

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.real,
    pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_training_on_devices_equals_training_here(ranks):
    """Several ranks share a device where there are fewer."""
    import torch

    torch.manual_seed(0)
    weight, x = torch.randn(4, 4), torch.randn(8, 4)
    local = weight.clone().requires_grad_()
    async with this_host().spawn_procs({"gpus": ranks}, preload=("torch",)) as procs:
        with procs.activate():
            remote = torch.tensor(weight.tolist(), requires_grad=True)
            x_there = torch.tensor(x.tolist())
        assert remote.device.type == "cuda"
        for _ in range(3):
            losses = []
            for w, inputs in ((local, x), (remote, x_there)):
                loss = (inputs @ w).square().mean()
                loss.backward()
                with torch.no_grad():
                    w.sub_(w.grad, alpha=0.1)
                    w.grad = None
                losses.append(loss.item())
            assert abs(losses[0] - losses[1]) < 1e-4
        assert torch.allclose(await trimesh.fetch_shard(remote, gpus=ranks - 1), local.detach(), atol=1e-4)


async def test_recorded_step_on_a_device():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            state, x = torch.zeros(4), torch.ones(4)

        @trimesh.compile
        def step(x):
            state.add_(x)
            return state * 2

        assert [step(x).sum().item() for _ in range(5)] == [8.0, 16.0, 24.0, 32.0, 40.0]


@pytest.mark.parametrize("ranks_beyond_devices", [0, 1])
async def test_collectives_on_devices(ranks_beyond_devices):
    """By NCCL where each rank has a device of its own, else by gloo; a rank that fails frees the others."""
    import torch

    ranks = torch.cuda.device_count() + ranks_beyond_devices
    preload = ("torch", "torch.distributed.tensor")
    async with this_host().spawn_procs({"gpus": ranks}, preload=preload) as procs:
        rank = procs.rank_tensor("gpus")
        assert rank.device.type == "cuda"
        everyone = list(range(ranks))
        for _ in range(2):
            assert rank.reduce("gpus").item() == sum(everyone)
            assert rank.float().reduce("gpus", "avg").item() == sum(everyone) / ranks
            assert rank.reduce("gpus", "stack").tolist() == everyone
            with procs.activate():
                each = torch.arange(ranks) + 10 * rank
            scattered = await trimesh.fetch_shard(each.reduce("gpus", scatter=True), gpus=ranks - 1)
            assert scattered.item() == 10 * sum(everyone) + ranks * (ranks - 1)
            a = torch.randn(2 * ranks, 2 * ranks)
            cut = trimesh.distribute(a, procs, ["gpus", None])
            assert torch.allclose(await trimesh.fetch(cut.T @ cut), a.T @ a, atol=1e-4)
            assert torch.equal(await trimesh.fetch(trimesh.redistribute(cut, [None, "gpus"])), a)
            with procs.activate():
                bad = torch.arange(2.0).to("cpu")[rank.to("cpu").reshape(1) * 9].to(rank.device)  # only 0 is in range
            if ranks > 1:
                with pytest.raises(MeshErrorGroup) as caught:
                    await trimesh.fetch(bad.reduce("gpus"))
                assert {type(error) for error in caught.value.exceptions} == {IndexError, CollectiveFailed}


async def test_values_seeds_and_moves_on_a_device():
    import torch

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        trimesh.manual_seed(3, procs)
        states = await trimesh.get_rng_state(procs)
        with procs.activate():
            drawn = torch.rand(70_000)
        trimesh.set_rng_state(states, procs)
        with procs.activate():
            assert torch.equal(torch.rand(70_000), drawn)
        first, second = (await trimesh.fetch(drawn)).values()
        assert (first.device.type, first.equal(second)) == ("cpu", False)
        moved = drawn.slice_mesh(gpus=0).to_mesh(procs.slice(gpus=1))
        assert moved.device.type == "cuda"
        assert torch.equal(await trimesh.fetch_shard(moved), first)
