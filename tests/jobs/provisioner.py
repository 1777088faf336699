"""Actors that spawn on hosts which they got as an argument."""

from __future__ import annotations

import os
import signal
from typing import Any

import trio

import trimesh.blocking as tb
from trimesh import Actor, HostMesh, Isolate, MeshErrorGroup, Restart, current_rank, endpoint, leaves, origin
from trimesh.aio import Actor as AsyncioActor


class Worker(Actor):
    """Runs where a provisioner has put it."""

    def __init__(self, base: int = 0) -> None:
        self.base = base

    @endpoint
    async def add(self, number: int) -> int:
        self.base += number
        return self.base

    @endpoint
    async def place(self) -> tuple[int, int, str]:
        return current_rank(), os.getpid(), os.environ.get("SHARD", "")

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


def _point(leaf: BaseException) -> Any:
    where = origin(leaf)
    return {} if where is None or where.point is None else where.point


class Provisioner(Actor):
    """Starts processes on hosts that the program owns."""

    @endpoint
    async def total(self, hosts: HostMesh, base: int) -> list[int]:
        async with hosts.spawn_procs({"gpus": 2}) as procs:
            workers = await procs.spawn("workers", Worker, base)
            await workers.add.call(1)
            async with procs.slice(gpus=1).spawn("more", Worker) as more:
                found = list((await more.add.call(5)).values())
            store = await procs.get_or_spawn("store", Worker, 100)
            return [*(await workers.add.call(1)).values(), *found, await store.add.call_one(1)]

    @endpoint
    async def places(self, hosts: HostMesh) -> list[tuple[int, int, str]]:
        def env(point: Any) -> dict[str, str]:
            return {"SHARD": f"{point['hosts']}.{point['gpus']}"}

        async with hosts.spawn_procs({"gpus": 1}, env=env, supervision=Isolate()) as procs:
            return list((await (await procs.spawn("workers", Worker)).place.call()).values())

    @endpoint
    async def hold(self, hosts: HostMesh, log: Any) -> None:
        async with hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            await log.note.call(("pids", [pid for _, pid, _ in (await workers.place.call()).values()]))
            await trio.sleep_forever()

    @endpoint
    async def loses(self, hosts: HostMesh) -> tuple[list[str], list[Any]]:
        """Return kinds and places of what the block raises when a process in it is killed."""
        try:
            async with hosts.spawn_procs({"gpus": 1}) as procs:
                workers = await procs.spawn("workers", Worker)
                await workers.slice(hosts=1).die.broadcast()
                await workers.slice(hosts=0).sleep.call()
        except MeshErrorGroup as error:
            found = list(leaves(error))
            return [type(leaf).__name__ for leaf in found], [dict(_point(leaf)) for leaf in found]
        return [], []

    @endpoint
    async def heals(self, hosts: HostMesh) -> list[int]:
        async with hosts.spawn_procs({"gpus": 1}, supervision=Restart()) as procs:
            workers = await procs.spawn("workers", Worker, 1)
            await workers.add.call(1)
            await workers.slice(hosts=1).die.broadcast()
            while True:
                try:
                    return list((await workers.add.call(0)).values())
                except MeshErrorGroup:
                    continue

    @endpoint
    async def refused(self, hosts: HostMesh) -> list[str]:
        texts = list[str]()
        for use in (lambda: hosts.grow(1), hosts.wait_notice, lambda: hosts.spawn_procs({"gpus": 1})):
            try:
                await use()
            except RuntimeError as error:
                texts.append(str(error))
        for start in (lambda: hosts.sync("src"), lambda: hosts.install("requirements.txt")):
            try:
                start()
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    @endpoint
    async def names(self, hosts: HostMesh) -> tuple[tuple[str, ...], dict[str, int], tuple[str, ...]]:
        return hosts.names, dict(hosts.extent), hosts["b"].names

    @endpoint
    async def echo(self, hosts: HostMesh) -> list[tuple[int, str]]:
        lines = list[Any]()
        await hosts.run(["echo", "there"], output=lines.append)
        return sorted((line.point["hosts"], line.text) for line in lines)

    @endpoint(thread=True)
    def total_blocking(self, hosts: HostMesh) -> list[int]:
        with tb.face(hosts).spawn_procs({"gpus": 1}) as procs:
            workers = procs.spawn("workers", Worker, 5)
            return list(workers.add.call(1).values())


class AsyncioProvisioner(AsyncioActor):
    """The same, whose endpoints run in an asyncio loop."""

    @endpoint
    async def total(self, hosts: HostMesh, base: int) -> list[int]:
        async with hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker, base)
            return list((await workers.add.call(1)).values())
