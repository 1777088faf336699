"""Pools, slots and replay buffers from asyncio, over real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Overloaded, RemoteCancelled, endpoint
from trimesh.service import Health, Paused, open_pool, open_replay, open_slots, open_store

pytestmark = pytest.mark.real


class Answerer(Actor):
    @endpoint(concurrency=4)
    async def answer(self, prompt: str) -> str:
        if not prompt:
            raise ValueError("no prompt")
        return prompt.upper()

    @endpoint(concurrency=4, group="streams")
    async def count(self, prompt: str) -> AsyncGenerator[str, None]:
        self.counting = getattr(self, "counting", 0) + 1
        try:
            while True:
                for letter in prompt:
                    yield letter
        finally:
            self.counting -= 1

    @endpoint(group="looks")
    def look(self) -> int:
        return self.counting

    @endpoint(concurrency=4, group="hangs")
    async def hang(self) -> None:
        await trio.sleep_forever()

    @endpoint(group="health")
    def ping(self) -> None: ...


class AsyncioAnswerer(trimesh.aio.Actor):
    """A program of asyncio: a replica of a pool, and who holds handles."""

    @endpoint(concurrency=4, group="answers")
    async def answer(self, prompt: str) -> str:
        await asyncio.sleep(0)
        return prompt.upper()

    @endpoint(concurrency=4)
    async def spell(self, prompt: str) -> AsyncGenerator[str, None]:
        for letter in prompt:
            await asyncio.sleep(0)
            yield letter

    @endpoint(concurrency=4)
    async def read(self, pool: Any) -> list[str]:
        async with pool.stream.spell("abc") as letters:
            return [letter async for letter in letters]

    @endpoint(concurrency=4)
    async def roll(self, pool: Any, slots: Any, buffer: Any, store: Any) -> list[Any]:
        async with slots.lease() as lease, pool.session("of an actor") as session:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(session.answer(text)) for text in "ab"]
            await buffer.add([task.result() for task in tasks], version=lease.version)
        async with pool.paused("wait"):
            await store.put("kept", {"version": lease.version})
        [trained] = await buffer.take(1)
        await slots.advance(version=1)
        return [trained, await store.get("kept"), session.moved]


async def answer_later(pool: Any, gate: asyncio.Event) -> Any:
    await gate.wait()
    return await pool.answer("late")


def test_pool_from_asyncio():
    """Y1, K04: blocks, requests, maps and rolls in the tasks of a loop."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            answerers = await procs.spawn("answerers", Answerer)
            async with open_pool(answerers) as pool:
                assert await asyncio.gather(*[pool.answer(text) for text in "abc"]) == ["A", "B", "C"]
                with pytest.raises(ValueError, match="no prompt"):
                    await pool.answer("")
                async with pool.session("s") as session, pool.map.answer(["x", "y"]) as results:
                    assert not session.moved
                    assert {index: text async for index, text in results} == {0: "X", 1: "Y"}
                async with pool.map_settled.answer(["x", ""]) as outcomes:
                    assert {index: outcome.ok async for index, outcome in outcomes} == {0: True, 1: False}
                gate = asyncio.Event()
                waiting = asyncio.create_task(answer_later(pool, gate))  # inside, it would belong to the pause
                async with pool.paused("keep"):
                    gate.set()
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
                assert await waiting == "LATE"
                async with pool.rolling() as replicas:
                    assert [await replica.answer.call_one("r") async for replica in replicas] == ["R", "R"]
                updated: list[str] = []

                async def update(replica: Any) -> None:
                    updated.append(await replica.answer.call_one("u"))

                await pool.each(update)
                assert updated == ["U", "U"]
                assert pool.statistics().failed == 2

    asyncio.run(main())


async def until(pool: Any, *, running: int, queued: int = 0) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(HANG_SECONDS):
        while (pool.statistics().running, pool.statistics().queued) != (running, queued):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_pauses_groups_and_full_queues_from_asyncio():
    """Y2, Y3, Y5, K04."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            answerers = await procs.spawn("answerers", Answerer)
            async with open_pool(answerers, concurrency=1, queue=1, health=Health(Answerer.ping)) as pool:
                first = asyncio.create_task(pool.options(group="red").hang())
                await until(pool, running=1)
                second = asyncio.create_task(pool[Answerer.answer]("later"))
                await until(pool, running=1, queued=1)
                with pytest.raises(Overloaded):
                    await pool.options(when_full="refuse").answer("refused")
                assert pool.cancel(group="red") == 1
                with pytest.raises(RemoteCancelled):
                    await first
                assert await second == "LATER"
                third = asyncio.create_task(pool.hang())
                await until(pool, running=1)
                async with pool.paused("abort"):
                    with pytest.raises(Paused):
                        await third
                fourth = asyncio.create_task(pool.hang())
                await until(pool, running=1)
                fourth.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fourth
                async with pool.paused("wait"):
                    assert pool.statistics().running == 0
                fifth = asyncio.create_task(pool.hang())
                await until(pool, running=1)
                assert pool.cancel_all(reason="over") == 1
                with pytest.raises(RemoteCancelled, match="over"):
                    await fifth
                await pool.resize(1)
                found = pool.statistics()
                assert (found.made, found.succeeded, found.cancelled, found.refused) == (6, 1, 4, 1)

    asyncio.run(main())


def test_streams_from_asyncio():
    """Y14, Y16, K04: an item that arrives together with a cancel is not lost; a cancel ends the generator."""

    async def read_on(pool: Any, found: list[str]) -> None:
        async with pool.stream[Answerer.count]("ab") as letters:
            async for letter in letters:
                found.append(letter)  # noqa: PERF401 - read while it grows

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            answerers = await procs.spawn("answerers", Answerer)
            async with open_pool(answerers, concurrency=1) as pool:
                found: list[str] = []
                async with pool.stream.count("xyz") as letters:
                    while len(found) < 30:
                        reading = asyncio.ensure_future(anext(letters))
                        await asyncio.sleep(0)
                        if len(found) % 3 == 0:
                            reading.cancel()
                        try:
                            found.append(await reading)
                        except asyncio.CancelledError:
                            found.append(await anext(letters))
                assert "".join(found) == "xyz" * 10
                assert await answerers.look.call_one() == 0
                reading = asyncio.create_task(read_on(pool, found := []))
                while len(found) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                assert await answerers.look.call_one() == 0
                with pytest.raises(TypeError, match="write `async with"):
                    await pool.count("a")
                statistics = pool.statistics()
                assert (statistics.made, statistics.cancelled, statistics.running) == (2, 2, 0)

    asyncio.run(main())


def test_slots_and_buffers_from_asyncio():
    """Y7, Y8, Y9, K04."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}):
            async with open_slots(batch=2, staleness=0) as slots, open_replay(capacity=9, slots=slots) as buffer:
                for text in "ab":
                    async with slots.lease() as lease:
                        await buffer.add(text, version=lease.version)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05), slots.lease():
                        pass
                with pytest.raises(LookupError):
                    async with buffer.taking(2):
                        raise LookupError("not trained")
                taking = asyncio.create_task(buffer.take(3))
                await asyncio.sleep(0)
                taking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await taking
                assert sorted(await buffer.sample(2)) == ["a", "b"]
                saved = slots.state_dict(), buffer.state_dict()
                assert await buffer.take(2) == ["a", "b"]
                await slots.advance(version=1)
                async with slots.lease() as lease:
                    assert lease.version == 1
                    await buffer.add("c", version=1)
                assert buffer.clear(reason="over") == 1
                assert (buffer.statistics().taken, slots.statistics().in_use) == (2, 0)
            async with open_slots(batch=2, staleness=0) as slots, open_replay(capacity=9) as buffer:
                slots.load_state_dict(saved[0])
                buffer.load_state_dict(saved[1])
                await buffer.advance(version=3)
                assert await buffer.take(2) == ["a", "b"]
                await slots.release(0)

    asyncio.run(main())


def test_actors_of_asyncio_are_replicas_and_hold_handles():
    """Y6, Y7, Y8, K05: the loop, with all parts of it programs of asyncio."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            actors = await procs.spawn("actors", AsyncioAnswerer)
            async with (
                open_pool(actors) as pool,
                open_slots(batch=1, staleness=0) as slots,
                open_replay(capacity=9, slots=slots) as buffer,
                open_store(procs) as store,
            ):
                assert await actors.slice(gpus=1).read.call_one(pool) == ["a", "b", "c"]
                found = await actors.slice(gpus=0).roll.call_one(pool, slots, buffer, store)
                assert found == [["A", "B"], {"version": 0}, False]
                assert (slots.statistics().version, buffer.statistics().taken) == (1, 1)

    asyncio.run(main())
