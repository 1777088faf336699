"""An actor calls another one, which raises.

Words: ZeroDivisionError: division by zero
"""

import trio

from trimesh import Actor, endpoint, this_host


class Judge(Actor):
    @endpoint
    async def judge(self, text: str) -> float:
        return 1 / len(text)


class Trainer(Actor):
    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    @endpoint
    async def step(self, text: str) -> float:
        return await self.judge.judge.call_one(text)


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        judge = await procs.spawn("judge", Judge)
        trainer = await procs.spawn("trainer", Trainer, judge)
        await trainer.step.call_one("")


trio.run(main)
