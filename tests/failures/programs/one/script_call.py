"""An endpoint raises in a script.

Words: ZeroDivisionError: division by zero
"""

from trimesh import Actor, endpoint
from trimesh.blocking import this_host


class Trainer(Actor):
    @endpoint
    def step(self, batch: int) -> float:
        return 1 / batch


with this_host().spawn_procs({"gpus": 2}) as procs:
    trainers = procs.spawn("trainers", Trainer)
    trainers.slice(gpus=1).step.call_one(0)
