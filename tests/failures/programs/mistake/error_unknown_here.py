"""An endpoint raises an error of a module that only its process has.

Words: define it in a module
"""

import sys
import types

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    def __init__(self) -> None:
        driver = types.ModuleType("driver")
        exec("class CudaFault(Exception): pass", driver.__dict__)
        sys.modules["driver"] = driver

    @endpoint
    async def step(self, batch: int) -> int:
        import driver

        raise driver.CudaFault("out of memory")


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
