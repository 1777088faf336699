"""Policies of pools, and streams of pools that shrink, for tasks of asyncio and for asyncio actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from tests.aio.loops import Attempt, Test, expire
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Backoff, Isolate, Overloaded, Retry, endpoint
from trimesh.service import Pool, PoolStatistics, Rate, Requests, open_pool

pytestmark = pytest.mark.real


class Generator(trimesh.aio.Actor):
    """Fails, or holds what it runs, as it is told."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.left_to_fail = 0
        self.held = self.cancelled = 0

    @endpoint(concurrency=16, idempotent=True)
    async def answer(self, prompt: str) -> str:
        await asyncio.sleep(0)
        if self.left_to_fail:
            self.left_to_fail -= 1
            raise ConnectionError("busy")
        return prompt.upper()

    @endpoint(concurrency=16, idempotent=True)
    async def hold(self, ranks: list[int]) -> int:
        """Wait on some ranks until the gate is open; return the rank."""
        if trimesh.current_rank() in ranks:
            self.held += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return trimesh.current_rank()

    @endpoint(concurrency=16)
    async def spell(self, prompt: str, ranks: list[int]) -> AsyncGenerator[str, None]:
        """Yield letters; wait on some ranks behind the first one until the gate is open."""
        for number, letter in enumerate(prompt):
            if number == 1 and trimesh.current_rank() in ranks:
                await self.gate.wait()
            yield letter

    @endpoint(concurrency=2, group="watch")
    async def fail_next(self, times: int) -> None:
        self.left_to_fail = times

    @endpoint(concurrency=2, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint(concurrency=2, group="watch")
    async def close_gate(self) -> None:
        self.gate.clear()

    @endpoint(concurrency=2, group="watch")
    async def counts(self) -> tuple[int, int]:
        return self.held, self.cancelled

    @endpoint(concurrency=2, group="users")
    async def use(self, pool: Any) -> list[str]:
        """Use a pool from an asyncio actor."""
        first = await pool.answer("a")
        async with pool.stream.spell("bc", []) as letters:
            return [first, *[letter async for letter in letters]]

    @endpoint(concurrency=2, group="users")
    async def use_refused(self, pool: Any) -> str:
        try:
            return str(await pool.options(when_full="refuse").answer("a"))
        except Overloaded as error:
            return str(error)


async def until(pool: Pool[Any], condition: Callable[[PoolStatistics], bool]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition(pool.statistics()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_retries(run: Callable[[Test], None]) -> None:
    """Y19, K04, K05: within the budget; a cancel during the backoff is heard at once."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            generators = await procs.spawn("generators", Generator)
            retry = Retry(2, on=(ConnectionError,), backoff=Backoff(0.001))
            async with open_pool(generators, retry=retry) as pool:
                await generators.fail_next.call(2)
                assert await pool.answer("a") == "A"
                await generators.fail_next.call(99)
                with pytest.raises(ConnectionError) as caught:
                    await pool.answer("b")
                assert "raised by attempt 3" in caught.value.__notes__[-1]
                await generators.fail_next.call(2)
                async with pool.map.answer(["c"] * 4) as results:
                    assert [value async for _, value in results] == ["C"] * 4
                assert pool.statistics().retried == 6
                assert await generators.use.call_one(pool) == ["A", "b", "c"]
            async with open_pool(generators, retry=Retry(1, on=ConnectionError, backoff=1_000.0)) as pool:
                await generators.fail_next.call(3)
                attempt = Attempt(pool.answer("d"))
                await until(pool, lambda found: found.arriving == 1)
                attempt.task.cancel()
                assert isinstance(await attempt.over(), asyncio.CancelledError)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(None) as limit:
                        waiting = Attempt(until(pool, lambda found: found.arriving == 1))
                        waiting.task.add_done_callback(lambda _: limit.reschedule(0.0))
                        await pool.answer("e")
                with pytest.raises(TimeoutError):
                    async with trimesh.aio.fail_after(0.05):
                        await pool.answer("f")
                found = pool.statistics()
                assert (found.cancelled, found.arriving, found.running, found.queued) == (3, 0, 0, 0)

    run(main)


def test_hedges(run: Callable[[Test], None]) -> None:
    """Y20, K04, K05: the first answer counts; a cancelled request ends both runs before its task ends."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            generators = await procs.spawn("generators", Generator)
            async with open_pool(generators, route=lambda request, candidates: candidates[0], hedge=0.01) as pool:
                assert await pool.hold([0]) == 1
                async with pool.paused("wait"):
                    assert (await generators.counts.call()).values() == ((1, 1), (0, 0))
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(pool.hold([0])) for _ in range(4)]
                assert [one.result() for one in asked] == [1] * 4
                attempt = Attempt(pool.hold([0, 1]))
                while (await generators.counts.call()).values() != ((6, 5), (1, 0)):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                attempt.task.cancel()
                assert isinstance(await attempt.over(), asyncio.CancelledError)
                assert (await generators.counts.call()).values() == ((6, 6), (1, 1))
                with pytest.raises(TimeoutError):
                    async with trimesh.aio.fail_after(0.1):
                        await pool.hold([0, 1])
                found = pool.statistics()
                assert found.hedged in (6, 7)  # the last one may be too late for its second run
                assert (found.succeeded, found.cancelled, found.running) == (5, 2, 0)
                assert [one.running for one in found.replicas] == [0, 0]

    run(main)


def test_rates_of_requests_and_streams(run: Callable[[Test], None]) -> None:
    """Y21, Y14, K04, K05: both count; those that leave hold none up; an actor gets `Overloaded`, too."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            generators = await procs.spawn("generators", Generator)
            async with open_pool(generators, rate=Rate(20, burst=1)) as pool:
                loop = asyncio.get_running_loop()
                start, begun = loop.time(), list[tuple[int, float]]()

                async def ask(number: int) -> None:
                    if number == 0:
                        await pool.options(cost=40).answer("a")  # the next one begins two seconds later
                        begun.append((number, 0.0))
                    elif number % 2:
                        async with pool.stream.spell("ab", []) as letters:
                            begun.append((number, loop.time() - start))
                            assert [letter async for letter in letters] == ["a", "b"]
                    else:
                        await pool.answer("a")
                        begun.append((number, loop.time() - start))

                tasks = list[asyncio.Task[None]]()
                for number in range(6):
                    tasks.append(asyncio.create_task(ask(number)))
                    await until(pool, lambda found, number=number: found.made == number + 1)  # type: ignore[misc]
                tasks[2].cancel()
                tasks[3].cancel()
                await asyncio.wait(tasks)
                assert [task.cancelled() for task in tasks] == [False, False, True, True, False, False]
                assert [number for number, _ in begun] == [0, 1, 4, 5]
                assert all(seconds >= 2 + place / 20 - 0.001 for place, (_, seconds) in enumerate(begun[1:], start=-1))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(None) as limit, pool.stream.spell("a" * 1_000, []) as letters:
                        await expire(limit)
                        await anext(letters)
                async with pool.options(cost=10_000).stream.spell("a", []) as letters:
                    with pytest.raises(Overloaded, match="rate of 20 a second"):
                        async with pool.options(when_full="refuse").stream.spell("a", []):
                            raise AssertionError
                    assert "rate of 20 a second" in await generators.use_refused.call_one(pool)
                    assert [letter async for letter in letters] == ["a"]
                found = pool.statistics()
                assert (found.refused, found.cancelled, found.arriving, found.running) == (2, 3, 0, 0)

    run(main)


def test_replica_that_is_taken_away_lets_its_streams_end(run: Callable[[Test], None]) -> None:
    """Y14, Y18, K04, K05: by `resize` and by `autoscale`; their consumers read on."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"replica": 2}, supervision=Isolate()) as procs:
            generators = await procs.spawn("generators", Generator)
            async with open_pool(generators, along="replica", procs=procs) as pool:

                async def read(text: str, begun: asyncio.Event) -> list[str]:
                    async with pool.stream.spell(text, [0, 1]) as letters:
                        found = [await anext(letters)]
                        begun.set()
                        return found + [letter async for letter in letters]

                async def begin(text: str) -> asyncio.Task[list[str]]:
                    begun = asyncio.Event()
                    task = asyncio.create_task(read(text, begun))
                    await begun.wait()
                    return task

                first, second = await begin("abc"), await begin("xyz")
                assert [one.running for one in pool.statistics().replicas] == [1, 1]
                shrinking = Attempt(pool.resize(1))
                await until(pool, lambda found: found.replicas[1].is_drained)
                await generators.open_gate.call()
                assert [await first, await second] == [["a", "b", "c"], ["x", "y", "z"]]
                assert await shrinking.over() is None

                await generators.slice(replica=0).close_gate.call_one()
                async with pool.autoscale(1, 2, by=Requests(1.5), every=0.01, grow_after=0.02, shrink_after=0.05):
                    first, second = await begin("abc"), await begin("xyz")
                    await until(pool, lambda found: found.replicas[1].is_up)
                    third = await begin("pqr")
                    assert [one.running for one in pool.statistics().replicas] == [2, 1]
                    first.cancel()
                    second.cancel()
                    await until(pool, lambda found: found.replicas[1].is_drained)
                    await (await trimesh.current_view(generators)).slice(replica=1).open_gate.call_one()
                    assert await third == ["p", "q", "r"]
                    await until(pool, lambda found: not found.replicas[1].is_up)
                found = pool.statistics()
                assert (found.failed, found.succeeded, found.cancelled, found.reading) == (0, 3, 2, 0)

    run(main)
