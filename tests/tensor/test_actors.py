"""Actors beside tensors: endpoints take tensors of the mesh and return some; others read the memory of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, endpoint, this_host, this_proc

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


class Beside(Actor):
    """Lives in the process of a rank."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    @endpoint
    async def total_kept(self) -> float:
        return float(self.kept.sum())

    @endpoint
    async def total(self, tensors: dict[str, Any], factor: float = 1) -> tuple[str, float]:
        return type(tensors["t"]).__name__, float(tensors["t"].sum()) * factor

    @endpoint
    async def fill(self, t: Any, value: float) -> None:
        t.fill_(value)

    @endpoint
    async def halves(self, t: Any, at: int) -> list[Any]:
        return [t[:at] * 10, t[at:]]

    @endpoint
    async def fail(self, t: Any) -> Any:
        raise ValueError(f"of {len(t)} numbers none is right")


class Here(Actor):
    """Lives in the controller's process."""

    @endpoint
    async def add(self, number: float) -> float:
        return number + 1


class Asking(Actor):
    """Lives in the process of a rank, and needs an actor of the controller's."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @endpoint(concurrency=2)
    async def through(self, me: Any, t: Any) -> Any:
        return await me.ask.call_one(t)  # by way of itself

    @endpoint
    async def ask(self, t: Any) -> Any:
        return t * await self.here.add.call_one(2.0)


class Reader(Actor):
    """Lives elsewhere, and reads memory of the ranks."""

    @endpoint
    async def read(self, handles: dict[str, trimesh.RDMABuffer]) -> list[float]:
        here = torch.empty(3)
        await handles["w"].read_into(here)
        return here.tolist()


@pytest.mark.daily
@pytest.mark.parametrize("preload", [("torch",), ()], ids=["loaded", "loading"])
async def test_endpoint_gets_the_tensor_of_its_own_rank(preload: tuple[str, ...]) -> None:
    async with this_host().spawn_procs({"gpus": 3}, preload=preload) as procs:
        actors = await procs.spawn("beside", Beside)
        with procs.activate():
            t = torch.ones(4) * procs.rank_tensor("gpus")
        for _ in range(200):
            t = t + 1  # all of them come before the call
        assert (await actors.total.call({"t": t}, factor=0.5)).values() == tuple(
            ("Tensor", 2.0 * (200 + rank)) for rank in range(3)
        )
        await actors.slice(gpus=1).fill.call_one(t, 7)  # the tensor itself, no copy
        assert [one.tolist()[0] for one in (await trimesh.fetch(t)).values()] == [200, 7, 202]
        assert (await actors.slice(gpus=0).total.call_one({"t": t * 2}))[1] == 1600  # kept until the call has ended
        keepers = await procs.spawn("keepers", Beside, t)
        del t
        assert (await keepers.total_kept.call()).values() == (800, 28, 808)


async def test_endpoint_is_not_sent_what_it_cannot_have() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        actors = await procs.spawn("beside", Beside)
        with procs.activate():
            t = torch.ones(4)
            spoiled = t[torch.tensor([9])]
        with pytest.raises(TypeError, match=r"1 live in other processes: write t.to_mesh"):
            await actors.fill.call(t.slice_mesh(gpus=0), 1)
        with pytest.raises(TypeError, match=r"await ep.call"):
            await actors.fill.broadcast(t, 1)
        async with trimesh.open_channel(object, capacity=1) as (port, _):
            with pytest.raises(TypeError, match="argument of a call"):
                await port.send(t)
        with pytest.raises(IndexError):
            await actors.slice(gpus=1).total.call_one({"t": spoiled})
        assert (await actors.total.call({"t": t})).values() == (("Tensor", 4.0),) * 2


async def test_results_of_endpoints_are_tensors_of_the_mesh() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        actors = await procs.spawn("beside", Beside)
        with procs.activate():
            t = torch.arange(5.0) + procs.rank_tensor("gpus")
        head, tail = trimesh.rref(actors.halves, t, 2)
        assert (head.shape, tail.shape) == ((2,), (3,))
        assert (await trimesh.fetch_shard(head + 1, gpus=1)).tolist() == [11, 21]
        _, tail = trimesh.rref(actors.halves, t * 2, at=4, propagate=lambda t, at: [t[:at], t[at:]])
        assert [one.tolist() for one in (await trimesh.fetch(tail)).values()] == [[8], [10]]
        failed = trimesh.rref(actors.fail, t, propagate=lambda t: t)
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="of 5 numbers")) as caught:
            await trimesh.fetch(failed * 2)
        assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 1}]
        with pytest.raises(TypeError, match="halves"):
            trimesh.rref(actors.halves, t)


async def test_a_value_that_needs_an_actor_of_this_process_is_not_waited_for_without_await() -> None:
    async with (
        this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs,
        this_proc().spawn("here", Here) as here,
    ):
        actors = await procs.spawn("asking", Asking, here)
        with procs.activate():
            t = torch.ones(2)
        for ep, first in ((actors.ask, ()), (actors.through, (actors,))):
            asked = trimesh.rref(ep, *first, t, propagate=lambda *args: args[-1])
            with pytest.raises(trimesh.DeadlockError, match=r"here\.add\(\).*await trimesh\.fetch") as caught:
                asked.sum().item()
            assert [(actor, name) for actor, name, _ in caught.value.cycle] == [("Here", "add")]
            assert (await trimesh.fetch_shard(asked)).tolist() == [3, 3]  # it only had to be awaited
            assert asked.sum().item() == 6


class Relay(Actor):
    """Lives in a process that is neither of a rank nor of the controller."""

    def __init__(self, here: Any) -> None:
        self.here = here

    @endpoint
    async def ask(self, t: Any) -> Any:
        return t * await self.here.add.call_one(2.0)

    @endpoint
    async def compute(self, t: Any) -> Any:
        await trio.sleep(0.3)  # longer than ranks take to say that they wait
        return t + 1


class ThroughRelay(Actor):
    """Lives beside a rank."""

    @endpoint
    async def ask(self, relay: Any, t: Any) -> Any:
        return await relay.ask.call_one(t)

    @endpoint
    async def compute(self, relay: Any, t: Any) -> Any:
        return await relay.compute.call_one(t)


async def test_the_way_to_an_actor_of_this_process_may_lead_through_others() -> None:
    async with (
        this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs,
        this_host().spawn_procs({"relays": 1}, name="others", preload=("torch",)) as others,
        this_proc().spawn("here", Here) as here,
    ):
        relay = await others.spawn("relay", Relay, here)
        actors = await procs.spawn("asking", ThroughRelay)
        with procs.activate():
            t = torch.ones(2)
        computed = trimesh.rref(actors.compute, relay, t, propagate=lambda _, t: t)
        assert computed.sum().item() == 4  # it only takes its time
        asked = trimesh.rref(actors.ask, relay, t, propagate=lambda _, t: t)
        with pytest.raises(trimesh.DeadlockError, match=r"here\.add\(\).*await trimesh\.fetch") as caught:
            asked.sum().item()
        assert [(actor, name) for actor, name, _ in caught.value.cycle] == [("Here", "add")]
        assert (await trimesh.fetch_shard(asked)).tolist() == [3, 3]


async def test_memory_of_the_ranks_is_read_by_others_until_the_block_ends() -> None:
    async with (
        this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as trainers,
        this_host().spawn_procs({"gpus": 2}, name="generators", preload=("torch",)) as generators,
    ):
        readers = await generators.spawn("readers", Reader)
        with trainers.activate():
            weights = torch.ones(3) * trainers.rank_tensor("gpus")
        async with trimesh.rdma_buffers({"w": weights}) as handles:
            assert (await readers.read.call(handles.item(gpus=1))).values() == ([1, 1, 1], [1, 1, 1])
            weights += 4  # the handle shows what is there
            await trimesh.fetch(weights)
            assert await readers.slice(gpus=0).read.call_one(handles.item(gpus=1)) == [5, 5, 5]
        with pytest.raises(trio.ClosedResourceError):
            await readers.slice(gpus=0).read.call_one(handles.item(gpus=1))
        with pytest.RaisesGroup(ValueError):
            async with trimesh.rdma_buffers(torch.t(weights.reshape(1, 3).expand(2, 3))):
                pass
        with pytest.raises(TypeError, match="tensors on a mesh"):
            async with trimesh.rdma_buffers(3):
                pass
