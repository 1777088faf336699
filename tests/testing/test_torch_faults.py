"""Operators of torch that run out of memory, break their device or hang, simulated and over real processes (S1)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.testing.actors import is_exact

import trimesh
from trimesh import Actor, endpoint, this_host
from trimesh.testing import simulate

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = pytest.mark.torch
BOTH = pytest.mark.mesh_backend("sim", "proc")


class Trainer(Actor):
    """Trains a layer, in the ways in which actors run code."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.errors = list[str]()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            yield
            nursery.cancel_scope.cancel()

    def train(self) -> float:
        self.optimizer.zero_grad()
        loss = self.layer(torch.ones(2, 4, requires_grad=True) * 1).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @endpoint
    async def step(self) -> float:
        await trio.sleep(0.001)
        return self.train()

    @endpoint
    def inline(self) -> float:
        return self.train()

    @endpoint(thread=True)
    def in_thread(self) -> float:
        return self.train()

    @endpoint
    async def in_task(self) -> None:
        async def train() -> None:
            await trio.sleep(0.001)
            self.train()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)

    @endpoint
    async def steps(self, count: int) -> AsyncGenerator[float, None]:
        for _ in range(count):
            yield self.train()

    @endpoint
    async def ping(self) -> int:
        return 1


@BOTH
@simulate(seeds=2)
async def test_operator_of_one_member_runs_out_of_memory(mesh, faults, fault_log):
    """In endpoints of all kinds, and the tasks that they start; forward, backward and in the optimizer."""
    trainers = await mesh.spawn("trainers", Trainer)
    one: Any = trainers.slice(gpus=1)
    for way, operator in (("step", "addmm"), ("inline", "mm"), ("in_thread", ""), ("in_task", "add_")):
        faults.torch({"gpus": 1}, operator, nth=2).out_of_memory()
        with pytest.RaisesGroup(torch.OutOfMemoryError, flatten_subgroups=True, allow_unwrapped=True) as caught:
            for _ in range(2):
                await getattr(one, way).call_one()
        assert "Tried to allocate" in str(next(trimesh.leaves(caught.value)))
        await getattr(one, way).call_one()
        await getattr(trainers.slice(gpus=0), way).call_one()

    faults.torch({"gpus": 1}, "mm", nth=2).raises(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="CUBLAS"), flatten_subgroups=True):
        async with one.steps.stream(3) as results:
            async for _ in results:
                pass
    assert {(fired.site, fired.where) for fired in fault_log} == {("torch", "procs[gpus=1]")}
    assert len(fault_log) == 5


@BOTH
@simulate(seeds=2)
async def test_healed_operator_runs(mesh, faults, fault_log):
    trainer = await mesh.slice(gpus=0).spawn("trainers", Trainer)
    heal = faults.torch({"gpus": 0}, "mm", times=1_000).out_of_memory()
    with pytest.raises(torch.OutOfMemoryError):
        await trainer.step.call_one()

    heal()
    heal()

    await trainer.step.call_one()
    assert len(fault_log) == 1


@BOTH
@simulate(seeds=2)
async def test_broken_device_fails_all_that_its_process_runs(faults):
    """Until the process is started anew."""
    restart = trimesh.Restart("one_for_one", intensity=1000, period=60)
    async with this_host().spawn_procs({"gpus": 2}, supervision=restart, setup=faults.armed()) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        one = trainers.slice(gpus=1)
        faults.torch(procs.slice(gpus=1), "mm").breaks_device()
        for _ in range(3):
            with pytest.raises(torch.AcceleratorError, match="CUDA error"):
                await one.step.call_one()
            await trainers.slice(gpus=0).step.call_one()
        assert await one.ping.call_one() == 1

        faults.kill(procs.slice(gpus=1))
        with trio.fail_after(60):
            while not (await one.ping.call_settled()).values()[0].ok:  # noqa: ASYNC110 - of its death
                await trio.sleep(0.1)
        await procs.settled()
        assert await one.step.call_one() > 0


@BOTH
@simulate(seeds=2)
async def test_operator_hangs_until_it_is_healed(mesh, faults, fault_log):
    """A thread of a real process; a simulated one for a time."""
    trainer = await mesh.slice(gpus=0).spawn("trainers", Trainer)
    hang = faults.torch({"gpus": 0}, "mm")
    heal = hang.hangs(7.0) if is_exact() else hang.hangs()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.in_thread.call_one)
        while not fault_log:  # noqa: ASYNC110 - what fires has no event
            await trio.sleep(0.01)
        if not is_exact():
            heal()
    if is_exact():
        assert trio.current_time() - start >= 7


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=2)
async def test_rank_of_a_mesh_of_tensors_runs_out_of_memory(mesh, faults):
    with mesh.activate():
        weight = torch.ones(2, 2)
        healthy = weight + 1
        assert (await trimesh.fetch_shard(weight @ weight, gpus=0)).tolist() == [[2, 2], [2, 2]]
        faults.torch({"gpus": 1}, "mm", nth=2).out_of_memory()
        await trimesh.fetch(weight @ weight)
        wrong = weight @ weight

    with pytest.raises(trimesh.MeshErrorGroup) as caught:
        await trimesh.fetch(wrong + 1)
    (error,) = trimesh.leaves(caught.value)
    assert isinstance(error, torch.OutOfMemoryError)
    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert (await trimesh.fetch_shard(wrong, gpus=0)).tolist() == [[2, 2], [2, 2]]
    await trimesh.fetch(healthy @ weight)


@pytest.mark.mesh_backend("proc")
@simulate(seeds=1)
async def test_compiled_step_of_one_rank_runs_out_of_memory(mesh, faults):
    with mesh.activate():
        weight = torch.ones(2, 2)
        step = trimesh.compile(lambda t: (t @ t + 1).sum())
        for _ in range(4):
            await trimesh.fetch(step(weight))
        faults.torch({"gpus": 1}, "mm", nth=2).out_of_memory()
        await trimesh.fetch(step(weight))
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            await trimesh.fetch(step(weight))
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        await trimesh.fetch(step(weight))


@pytest.mark.mesh_backend("proc")
@simulate(seeds=1)
async def test_collective_of_one_rank_fails_and_hangs(mesh, faults, fault_log):
    """N3: one failure is repeated in a new group; a lasting one fails the operation."""
    with mesh.activate():
        ones = torch.ones(2)

    async def total() -> list[float]:
        return (await trimesh.fetch_shard(trimesh.reduce(ones, "gpus", "sum"), gpus=0)).tolist()

    assert await total() == [2, 2]
    faults.collective({"gpus": 1}).fails()
    assert await total() == [2, 2]
    assert len(fault_log) == 1

    heal = faults.collective({"gpus": 1}, times=1_000).fails()
    with pytest.raises(trimesh.MeshErrorGroup) as caught:
        await trimesh.fetch(trimesh.reduce(ones, "gpus", "sum"))
    heal()
    planned, other = caught.value.exceptions
    assert trimesh.origin(planned).point == {"gpus": 1}
    assert "a planned fault" in str(planned)
    assert isinstance(other, trimesh.CollectiveFailed)  # not that a connection was closed
    assert "a planned fault" in str(other.__cause__)
    fired = len(fault_log)

    heal = faults.collective({"gpus": 1}).hangs()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(total)
        while len(fault_log) == fired:  # noqa: ASYNC110 - the same
            await trio.sleep(0.01)
        heal()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda faults, mesh: faults.torch(mesh, "matmul"), "aten::matmul is computed by others"),
        (lambda faults, mesh: faults.torch(mesh, "addm"), r"torch has no operator aten::addm \(is it addmv\?\)"),
        (lambda faults, mesh: faults.torch(mesh, nth=0), "nth must be a whole number from 1"),
        (lambda faults, mesh: faults.collective(mesh).hangs(0), "seconds must be above 0"),
    ],
)
@simulate(seeds=1)
async def test_wrong_torch_faults_are_refused(mesh, faults, act, text):
    with pytest.raises(ValueError, match=text):
        act(faults, mesh)
