"""Ray's async actor: endpoints are coroutines of asyncio, several run at once, one streams; a call is cancelled.

Run it: python examples/ray/async_actor.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import trimesh
from trimesh import endpoint


class Server(trimesh.aio.Actor):
    """Answers requests in batches, as an inference server does."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, asyncio.Future[str]]] = []
        self.largest_batch = 0
        self.cancelled = 0
        self.begun = asyncio.Event()

    @endpoint(concurrency=100)  # @ray.remote(max_concurrency=100)
    async def generate(self, prompt: str) -> str:
        """Return an answer; the first of a batch computes it for all."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, answer))
        if len(self.waiting) == 1:
            await asyncio.sleep(0.05)  # others join
            batch, self.waiting = self.waiting, []
            self.largest_batch = max(self.largest_batch, len(batch))
            for text, one in batch:
                one.set_result(text.upper())
        return await answer

    @endpoint(concurrency=100)
    async def tokens(self, prompt: str) -> AsyncGenerator[str, None]:
        """Yield an answer word by word."""
        for word in prompt.split():
            await asyncio.sleep(0)
            yield word.upper()

    @endpoint(concurrency=100)
    async def wait_forever(self) -> None:
        """Stay until cancelled."""
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    @endpoint(concurrency=100)
    async def wait_begun(self) -> None:
        """Wait until one stays."""
        await self.begun.wait()

    @endpoint(concurrency=100)
    async def facts(self) -> tuple[int, int]:
        """Return the size of the largest batch, and how many calls were cancelled."""
        return self.largest_batch, self.cancelled


async def main() -> None:
    async with trimesh.aio.spawn_procs({"servers": 1}) as procs:
        server = await procs.spawn("server", Server)

        answers = await asyncio.gather(*(server.generate.call_one(f"prompt {n}") for n in range(8)))
        print("answers:", answers)

        async with server.tokens.stream("one word after the other") as words:
            print("tokens:", " ".join([word async for _, word in words]))

        call = asyncio.create_task(server.wait_forever.call_one())
        await server.wait_begun.call_one()
        call.cancel()  # ray.cancel(...)
        await asyncio.wait([call])
        batch, cancelled = await server.facts.call_one()
        print(f"batches of up to {batch}; cancelled calls that have unwound: {cancelled}")


if __name__ == "__main__":
    asyncio.run(main())
