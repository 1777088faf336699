"""Tensor programs and publications in tasks of asyncio and in asyncio actors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trimesh
from trimesh import endpoint
from trimesh.service.weights import Publication, ShardPublisher, publication_of

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def test_tensors_in_asyncio() -> None:
    async def compute(procs: Any, start: int) -> list[float]:
        made: list[Any] = []
        for step in range(5):
            with procs.activate():
                await asyncio.sleep(0)
                made.append(torch.full((), float(start + step)))
            await asyncio.sleep(0)
        total = sum(made)
        assert isinstance(total, torch.Tensor)
        return [value.item() for value in (await trimesh.fetch(total)).values()]

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
            first, second = procs.slice(gpus=slice(0, 1)), procs.slice(gpus=slice(1, 2))
            assert await asyncio.gather(compute(first, 1), compute(second, 10), compute(procs, 100)) == [
                [15],
                [60],
                [510, 510],
            ]
            with procs.activate():
                t = torch.ones(3)
            assert t.sum().item() == 3.0  # without await, too
            team = t._held.team
            t.add_(1)
            while team.executed < team.issued:  # noqa: ASYNC110 - it leaves without anybody asking for a value
                await asyncio.sleep(0.001)
            trimesh.manual_seed(1, procs, same=True)
            assert (await trimesh.inspect(t)).tolist() == [2, 2, 2]

    asyncio.run(main())


class Publisher(trimesh.aio.Actor):
    """Publishes versions of a weight."""

    def __init__(self) -> None:
        self.shards = ShardPublisher(retain=2)

    @endpoint
    async def publication(self) -> Any:
        return self.shards.handle

    @endpoint
    async def publish(self, version: int) -> None:
        await self.shards.publish({"w": torch.full((16, 16), float(version))}, version=version)


class Reader(trimesh.aio.Actor):
    """Pins them."""

    @endpoint(concurrency=4)
    async def pull(self, weights: Publication, version: int) -> list[float]:
        return await pinned(weights, version)


async def pinned(weights: Publication, version: int) -> list[float]:
    """Wait for a version; return the values in it."""
    mine = torch.empty(16, 16)
    await weights.wait_newer(version - 1)
    async with weights.pin() as snapshot:
        await snapshot.read_into({"w": mine})
    return sorted({value for row in mine.tolist() for value in row})


def test_pins_of_asyncio_tasks_and_actors_read_one_version() -> None:
    """N4, Y10, K04, K05: a task that waits for a version is cancelled without effect on the others."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
            publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
            reader = await procs.slice(gpus=1).spawn("reader", Reader)
            weights = publication_of(await publisher.publication.call())
            waiting = [asyncio.create_task(pinned(weights, 1)) for _ in range(3)]
            there = asyncio.create_task(reader.pull.call_one(weights, 1))
            await asyncio.sleep(0)
            waiting[0].cancel()
            await publisher.publish.call_one(1)
            assert await asyncio.gather(*waiting[1:], there) == [[1.0]] * 3
            assert waiting[0].cancelled()
            await publisher.publish.call_one(2)
            assert await pinned(weights, 2) == await reader.pull.call_one(weights, 2) == [2.0]

    asyncio.run(main())
