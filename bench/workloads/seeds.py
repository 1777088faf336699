"""A simulated test as a user runs it: the first one, from the command to the verdict, and then seeds a second.

Four actors pass numbers in a ring while chaos kills, stops and delays them. Both figures are processor time of pytest;
seeds are those of a long run less those of a short one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("first_test", "a simulated test under one seed: processor time of pytest", "s"),
    Metric("seeds", "seeds of four actors under chaos, a second of a processor", "1/s", is_rate=True),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it has no simulation")

SEEDS = 50
SMOKE_SEEDS = 5

_TEST = """
import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate


class Node(Actor):
    @endpoint(concurrency=8)
    async def meet(self, nodes):
        self.following = nodes.slice(gpus=(trimesh.context().point["gpus"] + 1) % 4)

    @endpoint(concurrency=8)
    async def add(self, number, left):
        return number if left == 0 else await self.following.add.call_one(number + 1, left - 1)


@simulate(per_host={"gpus": 4}, supervision=trimesh.Restart(intensity=1000, period=60))
async def test_ring(mesh, chaos):
    nodes = await mesh.spawn("nodes", Node)
    async with chaos.safety(chaos.plan(kill=1, stop=1, delay=2, lag=1, every=(0.1, 1.0), max_down=1), duration=20):
        for number in range(20):
            try:
                await nodes.meet.call(nodes)
                assert await nodes.slice(gpus=0).add.call_one(number, 4) == number + 4
            except* (trimesh.MeshError, AttributeError):  # AttributeError: of a node that came back meanwhile
                await trio.sleep(0.1)
"""


def spent(path: Path, seeds: int) -> float:
    """Return the processor time of a run of the test, in seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--mesh-seeds={seeds}", path.name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=path.parent, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the test failed:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(scale: Scale) -> Samples:
    found: Samples = {"first_test": [], "seeds": []}
    seeds = SMOKE_SEEDS if scale.is_smoke else SEEDS
    with tempfile.TemporaryDirectory(prefix="trimesh-seeds-") as folder:
        path = Path(folder, "test_ring.py")
        path.write_text(_TEST)
        for _ in range(1 if scale.is_smoke else 3):
            first = spent(path, 1)
            found["first_test"].append(first)
            found["seeds"].append(seeds / max(spent(path, 1 + seeds) - first, 1e-3))
    return found


async def trimesh_side(scale: Scale) -> Samples:
    return await trio.to_thread.run_sync(measured, scale)
