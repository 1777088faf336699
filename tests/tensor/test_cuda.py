"""The same programs with tensors of CUDA devices, where there is one."""

from __future__ import annotations

import importlib.util

import pytest

import trimesh
from trimesh import this_host

HAS_CUDA = importlib.util.find_spec("torch") is not None and importlib.import_module("torch").cuda.is_available()

pytestmark = [
    pytest.mark.torch,
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
