"""Programs without a bug pass: what is still under way when a mesh is left is no breach of an oracle."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio
from tests.testing.actors import Worker

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate


class Poller(Actor):
    """Calls another actor in the background until it is stopped."""

    def __init__(self, other: Any) -> None:
        self.other = other

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.poll)
            yield
            nursery.cancel_scope.cancel()

    async def poll(self) -> None:
        while True:
            try:
                await self.other.count.call_one()
            except trimesh.MeshError:
                pass
            await trio.sleep(0.05)

    @endpoint
    async def give_up(self, seconds: float) -> bool:
        with trio.move_on_after(seconds) as scope:
            await self.other.step.call_one()
        return scope.cancelled_caught


class Impatient(Poller):
    """The same, and it calls only when it is asked to."""

    async def poll(self) -> None:
        await trio.sleep_forever()


@simulate(seeds=30, per_host={"gpus": 2})
async def test_background_calls_while_the_mesh_is_left(mesh):
    worker = await mesh.slice(gpus=0).spawn("worker", Worker)
    await mesh.slice(gpus=1).spawn("poller", Poller, worker)

    await trio.sleep(1)


@simulate(seeds=10, per_host={"gpus": 1})
async def test_call_that_the_test_gives_up_on_a_slow_link(mesh, faults):
    worker = await mesh.spawn("worker", Worker)
    await worker.step.call_one()
    faults.link("controller", {"gpus": 0}).delay(3.5)

    with trio.move_on_after(1):
        await worker.step.call_one()


@simulate(seeds=10, per_host={"gpus": 2})
async def test_call_that_an_actor_gives_up_on_a_slow_link(mesh, faults):
    worker = await mesh.slice(gpus=0).spawn("worker", Worker)
    client = await mesh.slice(gpus=1).spawn("client", Impatient, worker)
    await client.give_up.call_one(1)  # the link is there
    faults.link({"gpus": 1}, {"gpus": 0}).delay(3.5)

    assert await client.give_up.call_one(1)
