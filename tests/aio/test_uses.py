"""Verbs that wait, used by tasks of asyncio and by asyncio actors: what cancels and deaths leave of them (K04, K05)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.aio.loops import Attempt, Test

import trimesh
from trimesh import Isolate, MeshErrorGroup, Port, ProcDied, Retry, endpoint, this_host

pytestmark = pytest.mark.real


class Worker(trimesh.aio.Actor):
    """Works until it is told to end, or to die."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.news = asyncio.Event()
        self.log: list[str] = []

    def note(self, text: str) -> None:
        self.log.append(text)
        self.news.set()
        self.news = asyncio.Event()

    @endpoint(concurrency=8)
    async def hold(self, note: str = "hold") -> int:
        self.note(note)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.note(f"{note} cancelled")
            raise
        return trimesh.current_rank()

    @endpoint(concurrency=8)
    async def items(self, count: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(count):
                yield number
        finally:
            await asyncio.sleep(0)
            self.note("items over")

    @endpoint(concurrency=8, idempotent=True)
    async def die_at_rank(self, rank: int) -> int:
        if trimesh.current_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return trimesh.current_rank()

    @endpoint(concurrency=8)
    async def fail_at_rank(self, rank: int) -> int:
        await asyncio.sleep(0)
        if trimesh.current_rank() == rank:
            raise LookupError("at its rank")
        return trimesh.current_rank()

    @endpoint(concurrency=8, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint(concurrency=8, group="watch")
    async def wait(self, note: str) -> None:
        while note not in self.log:
            await self.news.wait()

    @endpoint(concurrency=8, group="watch")
    async def seen(self) -> list[str]:
        return list(self.log)


class Driver(trimesh.aio.Actor):
    """Uses each verb from inside of an asyncio actor."""

    @endpoint
    async def use_every_verb(self, workers: Worker) -> None:
        one, both = workers.slice(gpus=0), workers
        assert (await both.fail_at_rank.call(9)).values() == (0, 1)
        assert await one.fail_at_rank.call_one(9) == 0
        assert await both.fail_at_rank.choose(9) in (0, 1)
        settled = await both.fail_at_rank.call_settled(1)
        assert [outcome.ok for outcome in settled.values()] == [True, False]
        with pytest.raises(MeshErrorGroup):
            await both.fail_at_rank.call(0)
        started = [one.fail_at_rank.call_one.start(9), both.fail_at_rank.call.start(9)]
        assert await started[0] == 0
        assert (await started[1]).values() == (0, 1)
        await both.open_gate.broadcast()
        one.open_gate.broadcast_nowait()
        async with one.items.stream(1000) as items:
            async for _, item in items:
                if item == 3:
                    break
        assert "items over" in await one.seen.call_one()
        async with both.fail_at_rank.map([9] * 20) as results:
            assert len([index async for index, _ in results]) == 20
        total = await both.fail_at_rank.call_reduced(lambda first, second: first + second)(9)
        assert total == 1

    @endpoint
    async def retry(self, workers: Worker) -> int:
        return await workers.die_at_rank.options(retry=Retry(2, on=(ProcDied,))).choose(0)

    @endpoint
    async def hold_in_each_verb(self, workers: Worker, verb: str) -> None:
        await use(workers, verb)


async def use(workers: Worker, verb: str) -> None:
    """Wait in one verb until cancelled."""
    match verb:
        case "call":
            await workers.hold.call()
        case "call_settled":
            await workers.hold.call_settled()
        case "call_one":
            await workers.slice(gpus=0).hold.call_one()
        case "choose":
            await workers.hold.choose()
        case "start_in":
            async with asyncio.TaskGroup() as group:
                workers.hold.call.start_in(group)
        case "map":
            async with workers.hold.map(["hold"] * 2) as results:
                async for _ in results:
                    pass
        case _:
            raise AssertionError(verb)


VERBS = ["call", "call_settled", "call_one", "choose", "start_in", "map"]


@pytest.mark.parametrize("verb", VERBS)
def test_cancel_in_each_verb_ends_what_it_has_begun(run: Callable[[Test], None], verb: str) -> None:
    """C01, A1, C7, K04, K05: the endpoints have unwound when the task has ended."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            workers = await procs.spawn("workers", Worker)
            attempt = Attempt(use(workers, verb))
            begun = [asyncio.create_task(workers.slice(gpus=gpu).wait.call_one("hold")) for gpu in range(2)]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            attempt.task.cancel()
            assert isinstance(await attempt.over(), asyncio.CancelledError)
            for task in begun:
                task.cancel()
            await asyncio.wait(begun)
            logs = (await workers.seen.call()).values()
            assert {log.count("hold") - log.count("hold cancelled") for log in logs} == {0}
            assert sum(log.count("hold") for log in logs) >= 1

    run(main)


@pytest.mark.parametrize("verb", VERBS)
def test_cancel_passes_through_an_asyncio_actor_in_each_verb(run: Callable[[Test], None], verb: str) -> None:
    """C01, C10, K04, K05: from a task of asyncio, by an actor of asyncio, to others."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            workers = await procs.spawn("workers", Worker)
            driver = await procs.slice(gpus=1).spawn("driver", Driver)
            task = asyncio.create_task(driver.hold_in_each_verb.call_one(workers, verb))
            begun = [asyncio.create_task(workers.slice(gpus=gpu).wait.call_one("hold")) for gpu in range(2)]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            for one in begun:
                one.cancel()
            await asyncio.wait(begun)
            logs = (await workers.seen.call()).values()
            assert {log.count("hold") - log.count("hold cancelled") for log in logs} == {0}

    run(main)


async def test_asyncio_actor_uses_every_verb() -> None:
    """C6, C7, A1, A2, T1, K05."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        driver = await procs.slice(gpus=0).spawn("driver", Driver)
        for _ in range(2):
            await driver.use_every_verb.call_one(workers)


def test_tasks_that_choose_at_once_get_different_members(run: Callable[[Test], None]) -> None:
    """K04: a member with a call of another task has one call more."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 4}) as procs:
            workers = await procs.spawn("workers", Worker)
            tasks = [asyncio.create_task(workers.hold.choose()) for _ in range(8)]
            await workers.wait.call("hold")
            await workers.open_gate.call()
            assert sorted(await asyncio.gather(*tasks)) == [0, 0, 1, 1, 2, 2, 3, 3]

    run(main)


def test_retry_goes_to_another_member_after_a_death(run: Callable[[Test], None]) -> None:
    """C6, R09, K04: the first attempt kills its member."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
            workers = await procs.spawn("workers", Worker)
            busy = asyncio.create_task(workers.slice(gpus=1).hold.call_one())
            await workers.slice(gpus=1).wait.call_one("hold")  # so that the other one is chosen
            assert await workers.die_at_rank.options(retry=Retry(2, on=(ProcDied,))).choose(0) == 1
            assert (await workers.alive().seen.call()).values() == (["hold"],)
            await workers.slice(gpus=1).open_gate.call_one()
            assert await busy == 1

    run(main)


async def test_asyncio_actor_retries_after_a_death() -> None:
    """C6, R09, K05."""
    async with this_host().spawn_procs({"gpus": 3}, supervision=Isolate()) as procs:
        workers = await procs.slice(gpus=slice(0, 2)).spawn("workers", Worker)
        driver = await procs.slice(gpus=2).spawn("driver", Driver)
        assert await driver.retry.call_one(workers) == 1


def test_awaits_of_one_started_call_all_get_its_result(run: Callable[[Test], None]) -> None:
    """A1, K04: of many tasks, some of which are cancelled meanwhile."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            worker = await procs.spawn("worker", Worker)
            started = worker.hold.call_one.start()

            async def wait() -> int:
                return await started

            tasks = [asyncio.create_task(wait()) for _ in range(20)]
            await worker.wait.call_one("hold")
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks[::2])
            assert all(task.cancelled() for task in tasks[::2])
            await worker.open_gate.call_one()
            assert await asyncio.gather(*tasks[1::2]) == [0] * 10
            assert await started == 0

    run(main)


# ---- channels --------------------------------------------------------------------------------------------------------


class Echo(trimesh.aio.Actor):
    """Receives by a channel of its own and sends what comes to the caller's."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trimesh.open_channel(int, capacity=4) as (port, receiver):
            self.port, self.receiver = port, receiver
            yield

    @endpoint
    async def start(self, back: Port[int]) -> Port[int]:
        self.task = asyncio.create_task(self._echo(back))
        return self.port.clone()

    async def _echo(self, back: Port[int]) -> None:
        async with back:
            async for number in self.receiver:
                await back.send(10 * number)

    @endpoint
    async def end(self) -> None:
        await self.port.aclose()
        await self.task


def test_items_go_both_ways_between_asyncio_programs(run: Callable[[Test], None]) -> None:
    """T2, S03, S10, K04, K05: more than the channels hold, so that each side waits for the other."""

    async def main() -> None:
        async with (
            trimesh.aio.spawn_procs({"gpus": 1}) as procs,
            trimesh.open_channel(int, capacity=4) as (back, receiver),
        ):
            echo = await procs.spawn("echo", Echo)
            port = await echo.start.call_one(back)
            await back.aclose()

            async def send() -> None:
                async with port:
                    for number in range(100):
                        await port.send(number)

            sending = asyncio.create_task(send())
            found = [await receiver.receive() for _ in range(100)]
            assert found == [10 * number for number in range(100)]
            await sending
            await echo.end.call_one()
            assert [number async for number in receiver] == []

    run(main)
