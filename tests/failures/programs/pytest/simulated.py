"""A simulated test calls an endpoint that raises.

Words: ZeroDivisionError
"""

import os
import subprocess
import sys

from trimesh import Actor, ProcMesh, endpoint
from trimesh.testing import simulate


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return 1 / batch


@simulate(seeds=3, per_host={"gpus": 2})
async def test_step(mesh: ProcMesh) -> None:
    trainers = await mesh.spawn("trainers", Trainer)
    await trainers.step.call(0)


if __name__ == "__main__":
    options = ["-q", "-c", "/dev/null", "-o", "trio_mode=true", "--rootdir", os.path.dirname(__file__)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *options, __file__]
    subprocess.run(command, stdout=sys.stderr, check=False)
