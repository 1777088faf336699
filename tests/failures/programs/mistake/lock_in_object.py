"""An argument of a constructor holds a lock deep inside.

Words: trainer.optimizer._lock
"""

import threading

import trio

from trimesh import Actor, endpoint, this_host


class Optimizer:
    def __init__(self) -> None:
        self._lock = threading.Lock()


class State:
    def __init__(self) -> None:
        self.optimizer = Optimizer()


class Trainer(Actor):
    def __init__(self, trainer: State) -> None:
        self.state = trainer

    @endpoint
    async def step(self) -> int:
        return 1


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await procs.spawn("trainers", Trainer, State())


trio.run(main)
