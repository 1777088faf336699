"""A parameter server with elastic workers: a gradient has a key and counts once; a backup outlives the server.

Planted bugs: "twice" applies a repeated gradient again; "forgets" does so after a restart, as the backup has no keys;
"early" acknowledges a gradient before the backup has it; "stale" serves parameters from a cache.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import History, check_fresh, check_monotonic, check_once

BUGS: Final = ("twice", "forgets", "early", "stale")


class Backup(Actor):
    """Keeps the gradients that were applied, in order."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.keys: list[int] = []

    @endpoint
    async def save(self, applied: list[int], keys: list[int]) -> None:
        if len(applied) > len(self.applied):
            self.applied, self.keys = applied, keys

    @endpoint
    async def load(self) -> tuple[list[int], list[int]]:
        return self.applied, self.keys


class Server(Actor):
    """Applies gradients; its parameters are the list of them."""

    def __init__(self, backup: Backup, bug: str) -> None:
        self.backup, self.bug = backup, bug

    @asynccontextmanager
    async def lifespan(self):
        self.applied, self.keys = await self.backup.load.call_one()
        async with trio.open_nursery() as self.nursery:
            yield

    @endpoint
    async def push(self, key: int) -> None:
        if key in self.keys and self.bug != "twice":
            return
        applied = [*self.applied, key]
        keys = [] if self.bug == "forgets" else applied
        if self.bug == "early":
            self.nursery.start_soon(self.backup.save.call_one, applied, keys)
        else:
            await self.backup.save.call_one(applied, keys)
        self.applied, self.keys = applied, applied

    @endpoint
    async def pull(self) -> int:
        return self.applied[-1] if self.applied else 0


class Worker(Actor):
    """Computes gradients and serves parameters."""

    def __init__(self, server: Server, bug: str) -> None:
        self.server, self.bug = server, bug
        self.cached, self.cached_until = 0, 0.0

    @endpoint
    async def step(self, key: int) -> None:
        await trio.sleep(0.02)
        await self.server.push.call_one(key)

    @endpoint
    async def read(self) -> int:
        if self.bug == "stale" and trio.current_time() < self.cached_until:
            return self.cached
        self.cached, self.cached_until = await self.server.pull.call_one(), trio.current_time() + 0.2
        return self.cached


async def run(mesh: Any, chaos: Any, bug: str) -> None:
    """Step and read under chaos; each gradient must count once, and reads be fresh and never go back."""
    backup = await mesh.slice(gpus=0).spawn("backup", Backup)
    server = await mesh.slice(gpus=1).spawn("server", Server, backup, bug)
    workers = await mesh.slice(gpus=slice(2, 4)).spawn("workers", Worker, server, bug)
    history = History()
    plan = chaos.plan(
        kill=3, slow=1, lag=1, every=(0.1, 0.5), max_down=3, bounds={"lag": (0.1, 0.5)}, spare=[{"gpus": 0}]
    )

    async def until_done(begun: Any, name: str, *arguments: Any) -> None:
        for attempt in range(1000):
            worker = workers.slice(gpus=chaos.draw(*begun.operation.call, attempt).randrange(2))
            with suppress(trimesh.MeshError):
                begun.ok(await getattr(worker, name).call_one(*arguments))
                return

    async def read() -> None:
        while True:
            with history.invoke("reader", "read") as reading:
                await until_done(reading, "read")
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        async with chaos.safety(plan, duration=10):
            nursery.start_soon(read)
            for key in range(1, 21):
                with history.invoke("trainer", "step", key) as stepping:
                    await until_done(stepping, "step", key)
        nursery.cancel_scope.cancel()
    async with chaos.liveness(within=30):
        with suppress(trimesh.ProcDied):  # the last kill may have come just before
            await server.pull.call_one()
        await server.pull.call_one()
    applied, _ = await backup.load.call_one()
    check_once(history.operations, "step", applied)
    check_monotonic(history.operations, "read")
    check_fresh(history.operations, "read", "step", initial=0)
