"""Tasks of asyncio that call meshes: their order, eager ones, and those that callbacks of the loop start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from tests.aio.counted import AsyncioCounted, TrioCounted
from tests.aio.loops import Test, run_as_host, run_on_uvloop
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, MeshErrorGroup, endpoint

pytestmark = pytest.mark.real

TASKS, CALLS = 50, 20

needs_eager_tasks = pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are of Python 3.12 and newer")

Note = tuple[int, int]


class TrioLog(Actor):
    """Notes in what order calls arrive."""

    def __init__(self) -> None:
        self.log: list[Note] = []

    @endpoint
    async def note(self, task: int, number: int) -> Note:
        self.log.append((task, number))
        return task, number

    @endpoint
    def note_at_once(self, task: int, number: int) -> Note:
        self.log.append((task, number))
        return task, number

    @endpoint
    async def seen(self) -> list[Note]:
        return self.log


class AsyncioLog(trimesh.aio.Actor):
    """Notes in what order calls arrive, in asyncio."""

    def __init__(self) -> None:
        self.log: list[Note] = []

    @endpoint
    async def note(self, task: int, number: int) -> Note:
        self.log.append((task, number))
        return task, number

    @endpoint
    def note_at_once(self, task: int, number: int) -> Note:
        self.log.append((task, number))
        return task, number

    @endpoint
    async def seen(self) -> list[Note]:
        return self.log


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [TrioLog, AsyncioLog])
def test_messages_of_each_task_arrive_in_its_order(run: Callable[[Test], None], target: Any) -> None:
    """S01, A1, K04, K05: calls, started calls and broadcasts of one task, while others send theirs."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            log = await procs.spawn("log", target)

            async def send(task: int, dice: Random) -> None:
                started = []
                for number in range(CALLS):
                    name = dice.choice(["note", "note_at_once"])
                    match dice.randrange(3):
                        case 0:
                            assert await getattr(log, name).call_one(task, number) == (task, number)
                        case 1:
                            started.append((number, getattr(log, name).call_one.start(task, number)))
                        case _:
                            await getattr(log, name).broadcast(task, number)
                for number, one in started:
                    assert await one == (task, number)

            async with asyncio.TaskGroup() as group:
                for task in range(TASKS):
                    group.create_task(send(task, Random(task)))
            seen = await log.seen.call_one()
            assert sorted(seen) == [(task, number) for task in range(TASKS) for number in range(CALLS)]
            for task in range(TASKS):
                assert [number for one, number in seen if one == task] == list(range(CALLS))

    run(main)


@pytest.mark.parametrize("target", [TrioLog, AsyncioLog])
@pytest.mark.parametrize("loop", [run_as_host, run_on_uvloop])
def test_calls_of_tasks_arrive_in_the_order_in_which_the_tasks_began(loop: Callable[[Test], None], target: Any) -> None:
    """S01, K04, K05: 200 tasks that make a call each; Trio draws the order of its own tasks, asyncio does not."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            log = await procs.spawn("log", target)
            for turn in range(3):
                async with asyncio.TaskGroup() as group:
                    for task in range(200):
                        group.create_task(log.note.call_one(task, turn))
            assert await log.seen.call_one() == [(task, turn) for turn in range(3) for task in range(200)]

    loop(main)


# ---- eager tasks -----------------------------------------------------------------------------------------------------


@contextmanager
def eager_tasks() -> Iterator[None]:
    """Let the running loop step tasks where they are created."""
    loop = asyncio.get_running_loop()

    def start(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        eager: Any = {**options, "eager_start": True}  # `asyncio.eager_task_factory`, with uvloop's options, too
        return asyncio.Task(coroutine, loop=loop, **eager)

    loop.set_task_factory(start)
    try:
        yield
    finally:
        loop.set_task_factory(None)


@needs_eager_tasks
@pytest.mark.parametrize("target", [TrioCounted, AsyncioCounted])
def test_eager_tasks_call(run: Callable[[Test], None], target: Any) -> None:
    """E01, K04: each gets its result or its error; groups of them fail as others do."""

    async def main() -> None:
        with eager_tasks():
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                actors = await procs.spawn("actors", target)
                one = actors.slice(gpus=0)
                assert await asyncio.create_task(one.one_by_one.call_one(-1)) == -1
                numbers = range(100)
                assert await asyncio.gather(*(one.turns.call_one(number, number % 5) for number in numbers)) == [
                    *numbers
                ]
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(actors.one_by_one.call(1000 + number)) for number in range(10)]
                assert [task.result().values() for task in tasks] == [(1000 + number,) * 2 for number in range(10)]
                failing = asyncio.create_task(
                    fail_in_a_group(actors)
                )  # before Python 3.13 such a group leaves a cancel
                with pytest.raises(ExceptionGroup) as caught:
                    await failing
                assert isinstance(caught.value.exceptions[0], MeshErrorGroup)

    async def fail_in_a_group(actors: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(actors.turns.call(2000, "many"))

    run(main)


@needs_eager_tasks
@pytest.mark.parametrize("target", [TrioCounted, AsyncioCounted])
def test_cancel_of_an_eager_task_ends_its_call(run: Callable[[Test], None], target: Any) -> None:
    """C01, C02, K04: at once after it was created, some turns later, and when its endpoint runs."""

    async def main() -> None:
        with eager_tasks():
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                actor = await procs.spawn("actor", target)
                for number in range(40):
                    task = asyncio.create_task(actor.hold.call_one(number))
                    for _ in range(number // 2):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled()
                task = asyncio.create_task(actor.hold.call_one(100))
                await actor.wait_begun.call_one(100)
                task.cancel()
                await asyncio.wait([task])
                tally = await actor.tally.call_one()
                assert tally.cancelled == set(tally.begun) >= {100}
                assert set(tally.begun.values()) == {1}
                assert (tally.calls_queued, tally.calls_running) == (0, 1)

    run(main)


@needs_eager_tasks
def test_eager_tasks_open_blocks_and_streams(run: Callable[[Test], None]) -> None:
    """M1, S04, K04: a block is entered and left in a task that has begun where it was created."""

    async def body() -> list[int]:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            counter = await procs.spawn("counter", Counter)
            async with counter.count.stream(1000) as items:
                found = []
                async for _, item in items:
                    found.append(item)
                    if item == 5:
                        break
            assert await counter.is_closed.call_one()
            return found

    async def main() -> None:
        with eager_tasks():
            found = await asyncio.gather(asyncio.create_task(body()), asyncio.create_task(body()))
            assert found == [[0, 1, 2, 3, 4, 5]] * 2

    run(main)


class Counter(trimesh.aio.Actor):
    """Counts up in a stream."""

    def __init__(self) -> None:
        self.closed = False

    @endpoint
    async def count(self, end: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(end):
                yield number
        finally:
            self.closed = True

    @endpoint
    async def is_closed(self) -> bool:
        return self.closed


@needs_eager_tasks
async def test_asyncio_actor_may_start_eager_tasks() -> None:
    """K05: `eager_start`, as a factory that its own code uses, inside of an endpoint."""
    async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
        starter = await procs.spawn("starter", Starter)
        probe = await procs.spawn("probe", Probe)
        assert await starter.ask_eagerly.call_one(probe, 20) == list(range(20))
        assert await starter.ask_eagerly.call_one(probe, 3) == [0, 1, 2]


class Starter(trimesh.aio.Actor):
    """Starts tasks in its own ways."""

    @endpoint
    async def ask_eagerly(self, probe: Probe, count: int) -> list[int]:
        loop = asyncio.get_running_loop()
        eager: Any = {"loop": loop, "eager_start": True}
        tasks = [asyncio.Task(probe.note.call_one(number), **eager) for number in range(count)]
        return list(await asyncio.gather(*tasks))

    @endpoint
    async def ask_from_callbacks(self, probe: Probe, count: int) -> list[int]:
        loop = asyncio.get_running_loop()
        over: asyncio.Queue[int] = asyncio.Queue()
        tasks: set[asyncio.Task[Any]] = set()

        def start(number: int) -> None:
            task = loop.create_task(probe.note.call_one(number))
            tasks.add(task)
            task.add_done_callback(lambda done: over.put_nowait(done.result()))

        for number in range(count):
            loop.call_soon(start, number) if number % 2 else loop.call_later(0.001 * (number % 3), start, number)
        return sorted([await over.get() for _ in range(count)])


# ---- callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=needs_eager_tasks)])
def test_callbacks_of_the_loop_start_tasks_that_call(run: Callable[[Test], None], is_eager: bool) -> None:
    """K04: `call_soon`, `call_later` and a callback of a task that is done: no task runs where they are started."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            tasks: list[asyncio.Task[Any]] = []
            all_started = asyncio.Event()

            def start(number: int, *_: Any) -> None:
                assert asyncio.current_task() is None
                tasks.append(loop.create_task(probe.note.call_one(number)))
                if number < 30:
                    [loop.call_soon, lambda *args: loop.call_later(0, *args)][number % 2](start, number + 1)
                elif number < 60:
                    tasks[-1].add_done_callback(lambda _: start(number + 1))
                else:
                    all_started.set()

            if is_eager:
                with eager_tasks():
                    loop.call_soon(start, 0)
                    await all_started.wait()
            else:
                loop.call_soon(start, 0)
                await all_started.wait()
            assert await asyncio.gather(*tasks) == list(range(61))
            assert sorted(await probe.seen.call_one()) == list(range(61))

    run(main)


async def test_callbacks_of_an_asyncio_actor_start_tasks_that_call() -> None:
    """K05: they belong to no call, and run as the actor's."""
    async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
        starter = await procs.spawn("starter", Starter)
        probe = await procs.spawn("probe", Probe)
        assert await starter.ask_from_callbacks.call_one(probe, 20) == list(range(20))


def test_callback_broadcasts_and_starts_calls_without_a_task(run: Callable[[Test], None]) -> None:
    """K02, A1, K04: sync verbs work where no task runs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            started = loop.create_future()

            def send() -> None:
                probe.note.broadcast_nowait("cast")
                started.set_result(probe.note.call_one.start("started"))

            loop.call_soon(send)
            assert await (await started) == "started"
            assert await probe.seen.call_one() == ["cast", "started"]

    run(main)


class Eager(trimesh.aio.Actor):
    """Has the tasks of its loop start eagerly, whoever makes them."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        factory: Any = getattr(asyncio, "eager_task_factory")  # noqa: B009 - of Python 3.12 and newer
        asyncio.get_running_loop().set_task_factory(factory)

    @endpoint
    async def note(self, number: int) -> int:
        found: int = await asyncio.create_task(self.probe.note.call_one(number))
        return found

    @endpoint
    async def notes(self, count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            yield await self.probe.note.call_one(number)


@needs_eager_tasks
async def test_loop_of_an_asyncio_actor_may_start_all_tasks_eagerly() -> None:
    """K05: generators, too, whose tasks begin in a turn of Trio, run as tasks of asyncio."""
    async with (
        trimesh.this_host().spawn_procs({"gpus": 1}) as procs,
        trimesh.this_host().spawn_procs({"gpus": 1}) as others,
    ):
        probe = await others.spawn("probe", Probe)
        eager = await procs.spawn("eager", Eager, probe)
        assert await eager.note.call_one(7) == 7
        async with eager.notes.stream(3) as items:
            assert [number async for _, number in items] == [0, 1, 2]
        assert await eager.note.call_one(8) == 8
