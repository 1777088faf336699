"""An endpoint of an asyncio actor raises while it awaits another one.

Words: ZeroDivisionError: division by zero
"""

import asyncio

from trimesh import endpoint
from trimesh.aio import Actor, spawn_procs


class Judge(Actor):
    @endpoint
    async def judge(self, text: str) -> float:
        await asyncio.sleep(0)
        return 1 / len(text)


class Trainer(Actor):
    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    @endpoint
    async def step(self, text: str) -> float:
        async with asyncio.timeout(60):
            return await self.judge.judge.call_one(text)


async def main() -> None:
    async with spawn_procs({}) as procs:
        judge = await procs.spawn("judge", Judge)
        trainer = await procs.spawn("trainer", Trainer, judge)
        await trainer.step.call_one("")


asyncio.run(main())
