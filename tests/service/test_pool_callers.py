"""Pools from asyncio, over real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trimesh
from trimesh import Actor, endpoint
from trimesh.service import open_pool

pytestmark = pytest.mark.real


class Answerer(Actor):
    @endpoint(concurrency=4)
    async def answer(self, prompt: str) -> str:
        if not prompt:
            raise ValueError("no prompt")
        return prompt.upper()


async def answer_later(pool: Any, gate: asyncio.Event) -> Any:
    await gate.wait()
    return await pool.answer("late")


def test_pool_from_asyncio():
    """Y1, K04: blocks, requests, maps and rolls in the tasks of a loop."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            answerers = await procs.spawn("answerers", Answerer)
            async with open_pool(answerers) as pool:
                assert await asyncio.gather(*[pool.answer(text) for text in "abc"]) == ["A", "B", "C"]
                with pytest.raises(ValueError, match="no prompt"):
                    await pool.answer("")
                async with pool.session("s") as session, pool.map.answer(["x", "y"]) as results:
                    assert {index: text async for index, text in results} == {0: "X", 1: "Y"}
                    assert not session.moved
                gate = asyncio.Event()
                waiting = asyncio.create_task(answer_later(pool, gate))  # inside, it would belong to the pause
                async with pool.paused("keep"):
                    gate.set()
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
                assert await waiting == "LATE"
                async with pool.rolling() as replicas:
                    assert [await replica.answer.call_one("r") async for replica in replicas] == ["R", "R"]
                assert pool.statistics().failed == 1

    asyncio.run(main())
