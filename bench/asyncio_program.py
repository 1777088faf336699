"""Program on Trio, asyncio or uvloop that measures its own calls on request; `bench.workloads.asyncio` runs three.

    python -m bench.asyncio_program trio|asyncio|uvloop SCALE

SCALE is the JSON of a `Scale`. It reads lines `KIND ACTOR`, where KIND is a method of `Measurement` and ACTOR is trio
or asyncio, and answers each with the samples as a JSON list.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import trio

import trimesh.aio
from bench.meshes import asyncio_tasks, trimesh_mesh
from bench.meshes.trimesh_mesh import Member, Mesh, open_mesh
from bench.scale import Scale, timed_calls, timed_rates
from bench.workloads import services
from bench.workloads.loop import run_blocks
from bench.workloads.trimesh_actors import Hanger
from trimesh import endpoint, this_host
from trimesh.service import open_pool

AT_ONCE = 64
REPLICAS = 4
TICK_SECONDS = 2e-3
"""Longer than a process spins for an answer, so that the timer does not keep callers from spinning."""


class AsyncioMember(trimesh.aio.Actor):
    """The endpoints of `Member` that are measured, in an asyncio actor."""

    @endpoint
    async def pid(self) -> int:
        return 1

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def count(self, items: int) -> AsyncGenerator[int, None]:
        for item in range(items):
            yield item


MEMBERS = {"trio": Member, "asyncio": AsyncioMember}


class Measurement:
    """One method a kind of measurement; each takes what the actor runs on and returns samples.

    Args:
        tasks: Tasks of the program's loop: `trimesh_mesh` for Trio, or `asyncio_tasks`.
        scale: Sizes of one measurement.
        meshes: A mesh of one actor for each of `MEMBERS`.
    """

    def __init__(self, tasks: Any, scale: Scale, meshes: dict[str, Mesh]) -> None:
        self._tasks = tasks
        self._scale = scale
        self._meshes = meshes

    async def call(self, actor: str) -> list[float]:
        return await timed_calls(self._scale, lambda: self._meshes[actor].one(1))

    async def tasks(self, actor: str) -> list[float]:
        return await self._rates_at_once(lambda: self._meshes[actor].one(1))

    async def stream(self, actor: str) -> list[float]:
        return await timed_rates(self._scale, self._meshes[actor].stream, self._scale.stream_items)

    async def block(self, actor: str) -> list[float]:
        async def open_block(pool: Any) -> None:
            async with pool.paused("keep"):
                pass

        return await self._in_pool(actor, lambda pool: timed_calls(self._scale, lambda: open_block(pool)))

    async def block_call(self, actor: str) -> list[float]:
        async def call_in_block(pool: Any) -> None:
            async with pool.paused("keep"):
                await self._meshes[actor].one(1)

        return await self._in_pool(actor, lambda pool: timed_calls(self._scale, lambda: call_in_block(pool)))

    async def request(self, actor: str) -> list[float]:
        return await self._in_pool(actor, lambda pool: timed_calls(self._scale, lambda: pool.echo(1)))

    async def requests(self, actor: str) -> list[float]:
        return await self._in_pool(actor, lambda pool: self._rates_at_once(lambda: pool.echo(1)))

    async def generate(self, actor: str) -> list[float]:
        del actor  # that of `bench.workloads.services`
        async with (
            this_host().spawn_procs({"procs": services.REPLICAS}) as procs,
            procs.spawn("actors", Hanger) as mesh,
            open_pool(mesh, concurrency=services.CONCURRENCY) as pool,
        ):
            return await services.callers_times(
                self._scale, self._tasks.at_once, lambda: pool.generate(services.TOKENS)
            )

    async def loop(self, actor: str) -> list[float]:
        del actor  # those of `bench.workloads.loop_actors`
        return (await run_blocks(self._scale, self._tasks))["loop_rollouts"]

    async def ticker(self, actor: str) -> list[float]:
        late: list[float] = []

        async def tick() -> None:
            for _ in range(self._scale.calls // 2):
                due = time.perf_counter() + TICK_SECONDS
                await self._tasks.sleep(TICK_SECONDS)
                late.append((time.perf_counter() - due) * 1e6)

        await self._tasks.while_running(tick, lambda: self._meshes[actor].one(1))
        return late

    async def sockets(self, actor: str) -> list[float]:
        found: list[float] = []
        here, there = socket.socketpair()

        async def answer() -> None:
            while True:
                there.send(await self._tasks.receive(there))

        async def ask() -> None:
            for _ in range(self._scale.calls):
                start = time.perf_counter()
                here.send(b"\1")
                await self._tasks.receive(here)
                found.append((time.perf_counter() - start) * 1e6)

        with here, there:
            here.settimeout(0)
            there.settimeout(0)
            async with self._tasks.working(answer, 1):
                await self._tasks.while_running(ask, lambda: self._meshes[actor].one(1))
        return found

    async def _rates_at_once(self, call: Callable[[], Awaitable[object]]) -> list[float]:
        """Return the rates of calls by tasks that run at once, each of which makes one call after the other."""

        async def work(count: int) -> None:
            async def make_calls() -> None:
                for _ in range(max(1, count // AT_ONCE)):
                    await call()

            await self._tasks.at_once(make_calls, AT_ONCE)

        return await timed_rates(self._scale, work, max(1, self._scale.rate_calls // AT_ONCE) * AT_ONCE)

    async def _in_pool(self, actor: str, measure: Callable[[Any], Awaitable[list[float]]]) -> list[float]:
        async with this_host().spawn_procs({"procs": REPLICAS}) as procs:
            members = await procs.spawn("members", MEMBERS[actor])
            async with open_pool(members, concurrency=AT_ONCE) as pool:
                return await measure(pool)


async def answer_requests(tasks: Any, scale: Scale) -> None:
    """Answer until the lines end."""
    async with open_mesh(1) as trio_mesh, open_mesh(1, member=AsyncioMember) as asyncio_mesh:
        measurement = Measurement(tasks, scale, {"trio": trio_mesh, "asyncio": asyncio_mesh})
        print("ready", flush=True)
        while line := await tasks.in_thread(sys.stdin.readline):
            kind, actor = line.split()
            print(json.dumps(await getattr(measurement, kind)(actor)), flush=True)


def main() -> None:
    """Run what the command line names."""
    controller, sizes = sys.argv[1:]
    scale = Scale(**json.loads(sizes))
    if controller == "trio":
        trio.run(answer_requests, trimesh_mesh, scale)
        return
    factory = None
    if controller == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(answer_requests(asyncio_tasks, scale))


if __name__ == "__main__":
    main()
