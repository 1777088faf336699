"""Streams and maps from asyncio (K04): each step crosses into Trio, and the block ends the producers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
import trio
from tests.aio.loops import Attempt
from tests.conformance.probe import Notes

import trimesh
from trimesh import Actor, MeshErrorGroup, ProcDied, Retry, endpoint
from trimesh._runtime.tasks.crossing import in_trio_taking

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Producer(Actor):
    def __init__(self) -> None:
        self.notes = Notes()

    @endpoint
    async def count(self, end: int, fail: bool = False) -> AsyncGenerator[int, None]:
        try:
            for number in range(end):
                yield number
            if fail:
                raise LookupError("at the end")
        finally:
            self.notes.add("closed")

    @endpoint(concurrency=8, group="hold")
    async def hold(self) -> AsyncGenerator[int, None]:
        await trio.sleep_forever()
        yield 0

    @endpoint(concurrency=8)
    async def double(self, number: int) -> int:
        if number < 0:
            raise LookupError("negative")
        await trio.lowlevel.checkpoint()
        return 2 * number

    @endpoint(concurrency=8, idempotent=True)
    async def again(self, number: int) -> int:
        return number

    @endpoint(concurrency=8, group="watch")
    async def seen(self) -> list[str]:
        return self.notes.log


def test_stream_gives_every_item(run):
    """T1, K04: items of all ranks, in the order of each."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            producers = await procs.spawn("producers", Producer)
            found: dict[int, list[int]] = {0: [], 1: []}
            async with producers.count.stream(100) as results:
                async for point, value in results:
                    found[point["gpus"]].append(value)
            assert found == {0: list(range(100)), 1: list(range(100))}

    run(main)


def test_early_exit_joins_the_producers(run):
    """S04, K04: `break` cancels them, and they have unwound when the block has been left."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            producers = await procs.spawn("producers", Producer)
            begun = set()
            async with producers.count.stream(1_000_000) as results:
                async for point, _ in results:
                    begun.add(point["gpus"])
                    if len(begun) == 2:
                        break
            assert (await producers.seen.call()).values() == (["closed"], ["closed"])

    run(main)


def test_timeout_of_a_step_leaves_the_stream_whole(run):
    """K04, C03: a cancelled step has lost nothing; leaving the block afterwards ends the producers."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            producer = await procs.spawn("producer", Producer)
            found = []
            async with producer.count.stream(50) as results:
                while len(found) < 50:
                    try:
                        async with asyncio.timeout(0):
                            found.append((await anext(results))[1])
                    except TimeoutError:
                        found.append((await anext(results))[1])
            assert found == list(range(50))

    run(main)


def test_item_of_a_cancelled_step_is_put_back(run):
    """K04: what Trio has taken out for a task that was cancelled just then is not lost."""

    async def main():
        loop = asyncio.get_running_loop()
        put_back: list[str] = []

        async def step() -> str:
            loop.call_soon_threadsafe(attempt.task.cancel)
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
            return "item"

        async def take() -> str:
            return await in_trio_taking(step, put_back.append)

        async with trimesh.aio.open_trio():
            attempt = Attempt(take())
            assert isinstance(await attempt.over(), asyncio.CancelledError)
        assert put_back == ["item"]

    run(main)


def test_cancel_of_the_consumer_ends_the_producers(run):
    """S04, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            producer = await procs.spawn("producer", Producer)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as timeout, producer.count.stream(1_000_000) as results:
                    async for _ in results:  # it has begun
                        timeout.reschedule(asyncio.get_running_loop().time())
            assert await producer.seen.call_one() == ["closed"]

    run(main)


def test_error_of_a_producer_comes_after_its_items(run):
    """S05, E03, K04: one group, raised by the iteration, and not wrapped by the block."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            producer = await procs.spawn("producer", Producer)
            found = []
            with pytest.raises(MeshErrorGroup) as caught:
                async with producer.count.stream(5, fail=True) as results:
                    async for _, value in results:
                        found.append(value)
            assert found == [0, 1, 2, 3, 4]
            assert [type(error) for error in caught.value.exceptions] == [LookupError]

    run(main)


def test_two_tasks_at_once_are_refused(run):
    """T1, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            producer = await procs.spawn("producer", Producer)
            async with producer.hold.stream() as results:
                steps = [asyncio.ensure_future(anext(results)) for _ in range(2)]
                [refused], [waiting] = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
                assert isinstance(refused.exception(), trio.BusyResourceError)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

    run(main)


def test_map_spreads_items(run):
    """C7, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            producers = await procs.spawn("producers", Producer)
            async with producers.double.map(range(100)) as results:
                found = {index: value async for index, value in results}
            assert found == {number: 2 * number for number in range(100)}
            with pytest.raises(MeshErrorGroup):
                async with producers.double.map([1, -1]) as results:
                    async for _ in results:
                        pass

    run(main)


def test_retry_works(run):
    """C6, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            producers = await procs.spawn("producers", Producer)
            again = producers.again.options(retry=Retry(2, on=(ProcDied,)))
            assert (await again.call(1)).values() == (1, 1)
            assert await again.choose(2) == 2

    run(main)
