"""Operators, autograd, optimizers, recordings, groups and weights on each kind of device, beside plain torch.

The variant for the CPU shows that a test is right; that for CUDA compares with plain torch on the same device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.devices import on_each_device
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY  # noqa: E402 - after the skip

from trimesh.service.weights import ShardOf, ShardPublisher, publication_of  # noqa: E402 - needs torch
from trimesh.tensor import ParallelPlan, load_checkpoint, save_checkpoint  # noqa: E402 - likewise
from trimesh.tensor.groups import group as groups  # noqa: E402 - likewise

pytestmark = [pytest.mark.real, pytest.mark.torch]

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
STEPS = 5
TOLERANCE = 1e-4
"""Of float32 that other kernels add up in another order."""


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    return torch.allclose(found.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance)


# ---- operators -------------------------------------------------------------------------------------------------------


def operators(device: str) -> dict[str, Any]:
    """Compute with tensors of many kinds; the names say what."""
    numbers = torch.arange(24, device=device)
    a = (numbers.float().view(4, 6) - 11) / 7
    q = torch.linspace(-1, 1, 2 * 3 * 5 * 8, device=device).view(2, 3, 5, 8)
    image = torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=device).view(2, 3, 8, 8)
    kernel = torch.linspace(-1, 1, 4 * 3 * 3 * 3, device=device).view(4, 3, 3, 3)
    return {
        "matrix product": a @ a.T,
        "batched product": torch.bmm(q[0], q[0].transpose(1, 2)),
        "bfloat16": (a.bfloat16() @ a.T.bfloat16()).float(),
        "complex": torch.fft.rfft(a).abs(),
        "softmax": a.softmax(-1),
        "attention": nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        "convolution": nn.functional.conv2d(image, kernel, padding=1),
        "layer norm": nn.functional.layer_norm(a, (6,)),
        "sort": a.flip(1).sort(1).values,
        "cumulative sum": a.cumsum(1),
        "top": a.topk(2).indices,
        "integers": numbers // 5 + numbers % 3,
        "comparison": (a > 0) & (a < 1),
        "gather": a.gather(1, numbers.view(4, 6) % 6),
        "scatter": torch.zeros(4, 6, device=device).scatter_add(1, numbers.view(4, 6) % 3, a),
        "choice": torch.where(a > 0, a, -a),
        "indices": a[[0, 2]][:, 1:5:2],
        "masked": a.masked_fill(a > 1, 0.0),
        "solved": torch.linalg.solve(a @ a.T + 10 * torch.eye(4, device=device), a),
        "mean of double": a.double().mean(0),
    }


@on_each_device
async def test_operators_compute_what_plain_torch_computes(device: str) -> None:
    expected = operators(device)
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        with procs.activate():
            there = operators(device)
        assert {tensor.device.type for tensor in there.values()} == {device}
        found = {name: await trimesh.fetch_shard(tensor, gpus=1) for name, tensor in there.items()}
    tolerances = {"bfloat16": 1e-2}
    wrong = [name for name, value in found.items() if not close(value, expected[name], tolerances.get(name, TOLERANCE))]
    assert not wrong
    assert {name: value.dtype for name, value in found.items()} == {name: one.dtype for name, one in expected.items()}


@trimesh.remote(propagate=lambda t: t + 0)
def on_the_own_device(t: torch.Tensor) -> torch.Tensor:
    """Compute by plain torch in a rank, with memory that is made there by the name of the kind of device."""
    made = torch.ones(t.shape, device=t.device.type)
    assert made.device == t.device
    return made + t


@on_each_device
async def test_remote_function_computes_on_the_device_of_its_rank(device: str) -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        with procs.activate():
            t = torch.full((3,), 2.0)
        done = on_the_own_device(t + procs.rank_tensor("gpus"))
        assert done.device.type == device
        assert [value.tolist() for value in (await trimesh.fetch(done)).values()] == [[3.0] * 3, [4.0] * 3]


# ---- training --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


PLAIN, OTHERS = [*OPTIMIZERS][:2], [*OPTIMIZERS][2:]


def gpt() -> Any:
    torch.manual_seed(3)
    return GPT(layers=2)


def batch(rows: int = 4) -> tuple[Any, Any]:
    """Return a text and what follows in it."""
    text = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def step_of(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return what trains by one batch and returns the loss."""

    def step(text: Any, goal: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text).flatten(0, 1), goal.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def trained_here(device: str, make: Callable[..., Any]) -> tuple[list[float], dict[str, Any]]:
    """Train by plain torch; return the losses and the state."""
    model = gpt().to(device)
    step = step_of(model, make(model.parameters()))
    text, goal = (one.to(device) for one in batch())
    return [step(text, goal).item() for _ in range(STEPS)], model.state_dict()


@on_each_device
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.stress), 2])
@pytest.mark.parametrize("optimizer", [*PLAIN, *(pytest.param(one, marks=pytest.mark.stress) for one in OTHERS)])
async def test_module_on_a_mesh_trains_as_plain_torch_does(device: str, ranks: int, optimizer: str) -> None:
    """Autograd, clipping and the optimizer, with the batch cut over the ranks."""
    losses, state = trained_here(device, OPTIMIZERS[optimizer])
    async with this_host().spawn_procs({"dp": ranks}, preload=PRELOAD) as procs:
        model = trimesh.module_to_mesh(gpt(), procs, ParallelPlan.data("dp"))
        step = step_of(model, OPTIMIZERS[optimizer](model.parameters()))
        assert {one.device.type for one in model.parameters()} == {device}
        text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in batch())
        with procs.activate(global_tensors=True):  # for what the optimizer makes
            seen = [step(text, goal) for _ in range(STEPS)]
        found = await trimesh.fetch(seen)
        trained = await trimesh.fetch(model.state_dict())
    assert [round(one.item() - loss, 3) for one, loss in zip(found, losses, strict=True)] == [0.0] * STEPS
    assert not [name for name, value in state.items() if not close(trained[name], value, 10 * TOLERANCE)]


@on_each_device
async def test_fully_sharded_module_trains_as_plain_torch_does(device: str) -> None:
    losses, _ = trained_here(device, OPTIMIZERS["AdamW"])
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        model = trimesh.module_to_mesh(gpt(), procs, ParallelPlan.fully_sharded("dp"))
        step = step_of(model, OPTIMIZERS["AdamW"](model.parameters()))
        text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in batch())
        found = await trimesh.fetch([step(text, goal) for _ in range(STEPS)])
    assert [round(one.item() - loss, 3) for one, loss in zip(found, losses, strict=True)] == [0.0] * STEPS


@on_each_device
@pytest.mark.parametrize("ranks", [1, 2])
async def test_recorded_training_step_equals_plain_torch(device: str, ranks: int) -> None:
    losses, _ = trained_here(device, OPTIMIZERS["AdamW, fused"])
    async with this_host().spawn_procs({"dp": ranks}, preload=PRELOAD) as procs:
        model = trimesh.module_to_mesh(gpt(), procs, ParallelPlan.data("dp"))
        step = trimesh.compile(step_of(model, OPTIMIZERS["AdamW, fused"](model.parameters())))
        text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in batch())
        with procs.activate(global_tensors=True):  # for what the optimizer makes
            found = [step(text, goal).item() for _ in range(STEPS)]
        assert step.is_recorded
    assert [round(one - loss, 3) for one, loss in zip(found, losses, strict=True)] == [0.0] * STEPS


@on_each_device
async def test_training_goes_on_from_a_checkpoint(device: str, tmp_path: Path) -> None:
    losses, _ = trained_here(device, OPTIMIZERS["SGD with momentum"])
    found: list[Any] = []
    for begin, end, ranks in ((0, 2, 1), (2, STEPS, 2)):
        async with this_host().spawn_procs({"dp": ranks}, preload=PRELOAD) as procs:
            model = trimesh.module_to_mesh(gpt(), procs, ParallelPlan.data("dp"))
            optimizer = OPTIMIZERS["SGD with momentum"](model.parameters())
            state = {"model": model, "optimizer": optimizer}
            if begin:
                await load_checkpoint(tmp_path / "saved", state, procs)
            step = step_of(model, optimizer)
            text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in batch())
            found += await trimesh.fetch([step(text, goal) for _ in range(begin, end)])
            if not begin:
                await save_checkpoint(tmp_path / "saved", state, procs)
    assert [round(one.item() - loss, 3) for one, loss in zip(found, losses, strict=True)] == [0.0] * STEPS


# ---- groups ----------------------------------------------------------------------------------------------------------


class Warned(Actor):
    """Shares its process with a rank."""

    @endpoint
    async def texts(self) -> set[str]:
        """Return what groups of that rank have warned of."""
        return groups._warned


@on_each_device
@pytest.mark.parametrize("ranks_beyond_devices", [0, 1])
async def test_group_without_a_device_for_each_rank_warns_what_nccl_needs(
    device: str, ranks_beyond_devices: int
) -> None:
    """NCCL where each rank has a device of its own; one rank more is told in words, and served by gloo."""
    devices = max(torch.cuda.device_count(), 1)
    ranks = devices + ranks_beyond_devices
    async with this_host().spawn_procs({"gpus": ranks}, preload=PRELOAD) as procs:
        warned = await procs.spawn("warned", Warned)
        assert procs.rank_tensor("gpus").float().reduce("gpus").item() == sum(range(ranks))
        first, *others = (await warned.texts.call()).values()
    assert not any(others)
    if device == "cpu" or not ranks_beyond_devices:
        assert first == set()
    else:
        [text] = first
        assert f"{ranks} ranks share {devices}" in text


# ---- weights ---------------------------------------------------------------------------------------------------------


class Generator(Actor):
    """Has a GPT on a device, and takes over weights of others."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(8)
        self.model = GPT(layers=2).to(device)
        self.device = device

    @endpoint
    async def follow(self, weights: Any, version: int) -> dict[str, Any]:
        """Return the weights of the first version above one, after they were read into the model."""
        await weights.wait_newer(version)
        async with weights.pin() as snapshot:
            await snapshot.read_into(self.model.state_dict())
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}

    @endpoint
    async def columns(self, weights: Any, begin: int, end: int, rows: int) -> Any:
        """Return some columns of the matrix that actors have the rows of."""
        mine = torch.zeros((rows, end - begin), device=self.device)
        await weights.wait_newer(0)
        async with weights.pin() as snapshot:
            whole = (rows, 6)
            await snapshot.read_into({"matrix": ShardOf(mine, size=whole, start=(0, begin))})
        return mine.cpu()


@on_each_device
async def test_generator_follows_a_publication_of_ranks(device: str) -> None:
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs,
        this_host().spawn_procs({"replica": 1}, name="generators", preload=PRELOAD) as others,
    ):
        generator = await others.spawn("generator", Generator, device)
        model = trimesh.module_to_mesh(gpt(), procs, ParallelPlan.fully_sharded("dp"))
        step = step_of(model, OPTIMIZERS["SGD with momentum"](model.parameters()))
        text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in batch())
        async with trimesh.publication(model) as weights:
            for version in range(2):
                step(text, goal)
                assert await weights.publish() == version + 1
                expected = await trimesh.fetch(model.state_dict())
                with trio.fail_after(HANG_SECONDS):
                    found = await generator.follow.call_one(weights, version)
                assert all(found[name].equal(value) for name, value in expected.items())


class Trainer(Actor):
    """Has some rows of a matrix on a device, and publishes them."""

    def __init__(self, device: str, rows: int) -> None:
        rank, self.rows = trimesh.current_rank(), rows
        whole = torch.arange(12.0 * rows, device=device).view(2 * rows, 6)
        self.mine = whole[rank * rows : (rank + 1) * rows]
        self.start = (rank * rows, 0)
        self.shards = ShardPublisher()

    @endpoint
    async def handle(self) -> Any:
        return self.shards.handle

    @endpoint
    async def publish(self) -> int:
        size = (2 * self.rows, 6)
        return await self.shards.publish({"matrix": ShardOf(self.mine, size=size, start=self.start)})


@on_each_device
async def test_reader_cuts_what_actors_publish_another_way(device: str) -> None:
    async with this_host().spawn_procs({"gpus": 3}, preload=PRELOAD) as procs:
        trainers = await procs.slice(gpus=slice(0, 2)).spawn("trainers", Trainer, device, 4)
        generator = await procs.slice(gpus=2).spawn("generator", Generator, device)
        weights = publication_of(await trainers.handle.call())
        await trainers.publish.call()
        with trio.fail_after(HANG_SECONDS):
            found = await generator.columns.call_one(weights, 1, 5, 8)
    assert found.equal(torch.arange(48.0).view(8, 6)[:, 1:5])


@on_each_device
async def test_actor_and_rank_of_one_process_share_their_device(device: str) -> None:
    """A module that an actor trains by plain torch takes no memory from the ranks that the engine serves there."""
    async with this_host().spawn_procs({"gpus": 1}, preload=PRELOAD) as procs:
        generator = await procs.spawn("generator", Generator, device)
        model = trimesh.module_to_mesh(copy.deepcopy(gpt()), procs)
        async with trimesh.publication(model) as weights:
            await weights.publish()
            found = await generator.follow.call_one(weights, 0)
        expected = await trimesh.fetch(model.state_dict())
    assert all(found[name].equal(value) for name, value in expected.items())
