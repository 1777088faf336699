"""A test of real processes calls an endpoint that raises.

Words: ZeroDivisionError
"""

import os
import subprocess
import sys

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return 1 / batch


async def test_step() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.slice(gpus=1).step.call_one(0)


if __name__ == "__main__":
    options = ["-q", "-c", "/dev/null", "-o", "trio_mode=true", "--rootdir", os.path.dirname(__file__)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *options, __file__]
    subprocess.run(command, stdout=sys.stderr, check=False)
