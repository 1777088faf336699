"""The actors of the loop, for trimesh."""

from __future__ import annotations

from bench.workloads.loop_sizes import WEIGHTS
from trimesh import Actor, endpoint
from trimesh.rdma import Published


class NoOpGenerator(Actor):
    """Answers at once, and reads the weights that a trainer publishes."""

    def __init__(self) -> None:
        self.weights = {"w": bytearray(WEIGHTS)}

    @endpoint(concurrency=32, idempotent=True)
    async def generate(self, prompt: str) -> str:
        return prompt

    @endpoint
    async def pull(self, published: Published) -> None:
        async with published.pin() as snapshot:
            await snapshot.read_into(self.weights)


class NoOpTrainer(Actor):
    """Trains nothing, and publishes the weights after each step."""

    def __init__(self) -> None:
        self.weights = {"w": bytearray(b"\1") * WEIGHTS}
        self.published = Published()

    @endpoint
    async def publication(self) -> Published:
        return self.published

    @endpoint
    async def step(self, batch: list[str]) -> int:
        del batch
        return await self.published.publish(self.weights)
