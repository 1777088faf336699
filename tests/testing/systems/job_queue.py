"""A queue of jobs with leases: workers take a job, do it, and complete it; a lease that has expired is given again.

Planted bugs: "unchecked" completes a job without a look at its lease; "lost" never gives a job again, whose worker has
died; "early" acknowledges a job before the queue has it; "twice" takes a repeated `put` for another job.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import History, check_once

BUGS: Final = ("unchecked", "lost", "early", "twice")
LEASE: Final = 0.4


class Queue(Actor):
    """Jobs, the leases on them, and what is done."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.waiting: list[int] = []
        self.known: set[int] = set()
        self.leases: dict[int, tuple[int, float]] = {}
        self.results: list[int] = []
        self.tokens = 0

    @endpoint
    async def put(self, job: int) -> None:
        if job not in self.known or self.bug == "twice":
            self.known.add(job)
            self.waiting.append(job)

    @endpoint
    async def take(self) -> tuple[int, int] | None:
        now = trio.current_time()
        expired = [job for job, (_, ends) in self.leases.items() if ends <= now and self.bug != "lost"]
        for job in expired:
            del self.leases[job]
            self.waiting.append(job)
        if not self.waiting:
            return None
        job = self.waiting.pop(0)
        self.tokens += 1
        self.leases[job] = (self.tokens, now + LEASE)
        return job, self.tokens

    @endpoint
    async def complete(self, job: int, token: int) -> None:
        if self.bug == "unchecked" or self.leases.get(job, (0, 0.0))[0] == token:
            self.leases.pop(job, None)
            self.results.append(job)

    @endpoint
    async def done(self) -> list[int]:
        return self.results

    @endpoint
    async def is_idle(self) -> bool:
        return not self.waiting and (not self.leases or self.bug == "lost")


class Front(Actor):
    """Takes jobs from clients."""

    def __init__(self, queue: Queue, bug: str) -> None:
        self.queue, self.bug = queue, bug

    @asynccontextmanager
    async def lifespan(self):
        async with trio.open_nursery() as self.nursery:
            yield

    @endpoint
    async def put(self, job: int) -> None:
        if self.bug == "early":
            self.nursery.start_soon(self.queue.put.call_one, job)
        else:
            await self.queue.put.call_one(job)


class Worker(Actor):
    """Does one job at a time."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @endpoint
    async def work(self) -> None:
        taken = await self.queue.take.call_one()
        if taken is not None:
            await trio.sleep(0.1)
            await self.queue.complete.call_one(*taken)


async def run(mesh: Any, chaos: Any, bug: str) -> None:
    """Put jobs and work under chaos until the queue is empty; each job must be done once."""
    queue = await mesh.slice(gpus=0).spawn("queue", Queue, bug)
    front = await mesh.slice(gpus=1).spawn("front", Front, queue, bug)
    workers = await mesh.slice(gpus=slice(2, 4)).spawn("workers", Worker, queue)
    history = History()
    bounds = {"lag": (0.1, 1.0), "between": (0.1, 1.0)}
    plan = chaos.plan(kill=2, lag=1, between=1, every=(0.1, 0.5), max_down=2, bounds=bounds, spare=[{"gpus": 0}])

    async def work(rank: int) -> None:
        while True:
            with suppress(trimesh.MeshError):
                await workers.slice(gpus=rank).work.call_one()
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for rank in range(2):
            nursery.start_soon(work, rank)
        async with chaos.safety(plan, duration=10):
            for job in range(8):
                with history.invoke("client", "put", job) as putting:
                    while putting.operation.end is None:
                        with suppress(trimesh.MeshError):
                            await front.put.call_one(job)
                            putting.ok()
                await trio.sleep(chaos.draw("pause", job).uniform(0, 0.3))
        async with chaos.liveness(within=30):
            await trio.sleep(2 * LEASE)
            while not await queue.is_idle.call_one():  # noqa: ASYNC110 - an actor has no event for the test
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    check_once(history.operations, "put", await queue.done.call_one())
