"""Weight sync as in reinforcement learning: a trainer publishes its weights, four generators follow.

No process waits for another: the trainer publishes as fast as it can, each generator takes the latest version once it
is ready for one, and copies it while the trainer is already writing the next. All tensors of a version hold the same
number, so that a generator would see a torn one.

    python examples/weight_sync.py                  48 tensors, 64 MiB
    python examples/weight_sync.py 300 1024 20      tensors, MiB, versions
"""

import sys
import time

import torch
import trio

import trimesh
from trimesh import Actor, endpoint, this_host

GENERATORS = 4


class Trainer(Actor):
    """Has the weights, and publishes them."""

    def __init__(self, tensors: int, mebibytes: int) -> None:
        numel = max(1, (mebibytes << 20) // tensors // 4)
        self.weights = {f"layer.{index}": torch.zeros(numel) for index in range(tensors)}
        self.published = trimesh.rdma.Published(slots=GENERATORS + 2)

    @endpoint
    async def publication(self) -> trimesh.rdma.Published:
        """Return the handle by which generators read."""
        return self.published

    @endpoint
    async def train(self, versions: int) -> float:
        """Publish so many versions; return the seconds that publishing took, of each."""
        seconds = 0.0
        for version in range(1, versions + 1):
            for tensor in self.weights.values():
                tensor.fill_(version)
            start = time.perf_counter()
            await self.published.publish(self.weights)
            seconds += time.perf_counter() - start
        return seconds / versions


class Generator(Actor):
    """Follows the weights."""

    @endpoint
    async def follow(self, weights: trimesh.rdma.Published, last: int) -> tuple[int, int, float]:
        """Take versions until `last`; return how many were taken and torn, and the seconds of one."""
        mine: dict[str, torch.Tensor] = {}
        version = taken = torn = 0
        seconds = 0.0
        while version < last:
            await weights.wait_newer(version)
            start = time.perf_counter()
            async with weights.pin() as snapshot:
                if not mine:
                    mine = await snapshot.read()
                else:
                    await snapshot.read_into(mine)
                version = snapshot.version
            seconds += time.perf_counter() - start
            taken += 1
            torn += any(bool((tensor != version).any()) for tensor in mine.values())
        return taken, torn, seconds / taken


async def main(tensors: int = 48, mebibytes: int = 64, versions: int = 20) -> None:
    """Run one trainer and its generators, and print what they have seen."""
    async with this_host().warm(preload=("torch",)) as host, host.spawn_procs({"procs": 1 + GENERATORS}) as procs:
        trainer = await procs.slice(procs=0).spawn("trainer", Trainer, tensors, mebibytes)
        generators = await procs.slice(procs=slice(1, None)).spawn("generators", Generator)
        weights = await trainer.publication.call_one()
        print(f"{tensors} tensors, {mebibytes} MiB, {versions} versions, {GENERATORS} generators")
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                for point, (taken, torn, seconds) in (await generators.follow.call(weights, versions)).items():
                    print(f"  generator {point['procs']}: {taken} versions, {torn} torn, {seconds * 1000:.1f} ms each")
                    assert torn == 0

            nursery.start_soon(follow)
            seconds = await trainer.train.call_one(versions)
            print(f"  trainer: {seconds * 1000:.1f} ms to publish one, {mebibytes / 1024 / seconds:.1f} GiB/s")


if __name__ == "__main__":
    trio.run(main, *map(int, sys.argv[1:]))
