"""Tensor programs in the tasks of asyncio, whose loop has Trio as its guest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trimesh

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
