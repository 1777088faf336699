"""A mesh over two hosts whose members call each other."""

from __future__ import annotations

from trimesh import Actor, HostMesh, endpoint


class Worker(Actor):
    """What is called, here and on the other host."""

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def ask(self, other: Worker) -> int:
        return await other.double.call_one(4)


async def check_mesh(hosts: HostMesh) -> None:
    """Call both hosts, and one from the other."""
    async with hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("workers", Worker) as workers:
        assert list(await workers.double.call(4)) == [8, 8]
        assert await workers.slice(hosts=0).ask.call_one(workers.slice(hosts=1)) == 8
