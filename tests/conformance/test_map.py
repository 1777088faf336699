"""`map`: items over the members as they are free (rule C7; C01, E01, S04-S06 for maps)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.abc
import trio.testing
from tests.conformance.mapping import Worker
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, only_real, only_sim
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, MeshStopped, ProcDied, endpoint, limits


@pytest.mark.parametrize("window", [None, 1, 3, 500])
async def test_every_item_has_one_result(backend: Backend, window: int | None):
    """C7, S02: with its index."""
    async with backend.procs({"gpus": 3}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(range(100), window=window) as results:
            found = [(index, value) async for index, value in results]
            assert [result async for result in results] == []
        assert sorted(found) == [(index, index * index) for index in range(100)]


class Dataset:
    """Has the older protocol of iteration alone."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise IndexError
        return index


async def test_whatever_a_loop_takes_is_taken(backend: Backend):
    """C7."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        for items in (Dataset(), iter(range(5)), dict.fromkeys(range(5))):
            async with workers.square.map(items) as results:
                assert sorted([result async for result in results]) == [(index, index * index) for index in range(5)]


async def test_async_iterables_are_taken_as_they_come(backend: Backend):
    """C7: results do not wait for the next item."""
    send, receive = trio.open_memory_channel[int](0)
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(receive) as results:
            for number in (5, 6, 7):
                await send.send(number)
                assert await anext(results) == (number - 5, number * number)
            await send.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(results)


@pytest.mark.daily("real")
async def test_items_go_to_members_that_are_free(backend: Backend):
    """C7: one that is busy gets no more than the window gives it."""
    async with backend.procs({"gpus": 3}) as procs:
        workers = await procs.spawn("workers", Worker)
        ranks = Counter[int]()
        async with workers.slow_on.map(range(60), window=3) as results:
            async for _, (rank, _) in results:
                ranks[rank] += 1
                if sum(ranks.values()) == 40:
                    await workers.slice(gpus=0).wait.call_one("held")
                    assert ranks[0] == 0
                    await workers.open.call()
        assert sum(ranks.values()) == 60
        assert all(ranks[rank] for rank in range(3))


async def test_results_come_as_they_are_ready(backend: Backend):
    """C7."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.slow_on.map(range(2)) as results:
            assert await anext(results) == (1, (1, 1))
            await workers.open.call()
            assert await anext(results) == (0, (0, 0))


@pytest.mark.parametrize("is_option", [False, True])
async def test_no_more_than_the_window_is_under_way(backend: Backend, *, is_option: bool):
    """C7, S03: items are taken from the iterable only as results are taken."""
    taken = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        held = workers.hold.options(window=6).map(items()) if is_option else workers.hold.map(items(), window=6)
        async with held as results:
            await workers.wait.call("holding", 3)
            assert len(taken) <= 7
            await workers.open.call()
            for count in range(1, 30):
                await anext(results)
                assert len(taken) <= count + 7
        assert max(most for _, most, _ in (await workers.report.call()).values()) == 3
    assert len(taken) < 40


@only_sim
async def test_items_are_read_several_at_a_time(backend: SimBackend):
    """C7: as long as each member has some; a consumer that waits for a result makes room at once."""
    taken = []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(items(), window=9) as results:
            counts = []
            for _ in range(7):
                await trio.testing.wait_all_tasks_blocked()
                counts.append(len(taken))
                await anext(results)
        assert counts == [10, 10, 12, 12, 14, 14, 16]
        del taken[:]
        async with workers.hold.map(items(), window=2) as results, trio.open_nursery() as nursery:
            await workers.wait.call("holding", 2)
            first = attempt(nursery, anext, results)
            await trio.testing.wait_all_tasks_blocked()
            assert len(taken) == 3
            await workers.open.call()
            assert await first.result() in ((0, 0), (1, 1))


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    number = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.number += 1


@only_sim
@pytest.mark.parametrize("how", ["count", "time"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_reading_of_items_lets_other_tasks_run(backend: SimBackend, how: str, *, is_async: bool):
    """C7: after so many items, and after some time that they took."""
    steps = Steps()
    taken = Counter[int]()

    def items() -> Iterator[int]:
        for number in range(100):
            taken[steps.number] += 1
            if how == "time":
                backend.clock.jump(limits.MAP_UNBROKEN_SECONDS)
            yield number

    async def items_async() -> AsyncIterator[int]:
        for number in items():
            yield number

    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(items_async() if is_async else items(), window=100) as results:
            trio.lowlevel.add_instrument(steps)
            assert len([result async for result in results]) == 100
            trio.lowlevel.remove_instrument(steps)
    count = limits.MAP_UNBROKEN_ITEMS
    # The first one is not sent before other tasks have run.
    assert list(taken.values()) == ([1] * 100 if how == "time" else [1, count, count, count, 99 - 3 * count])


@only_real
@pytest.mark.daily("real")
async def test_item_is_sent_before_the_next_one_is_made(backend: Backend, tmp_path: Path):
    """C7: which may take long, in code that waits for nothing."""

    def items() -> Iterator[str]:
        for name in "ab":
            yield str(tmp_path / name)
            end = time.monotonic() + HANG_SECONDS
            while not (tmp_path / name).exists():
                assert time.monotonic() < end
                time.sleep(0.001)

    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.touch.map(items()) as results:
            assert len([result async for result in results]) == 2


async def test_no_task_for_each_call(backend: Backend):
    """C7."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        before = trio.lowlevel.current_statistics().tasks_living
        async with workers.hold.map(range(40), window=40) as results:
            await workers.wait.call("holding", 20)
            mine = trio.lowlevel.current_statistics().tasks_living - before
            assert mine <= (2 + 42 if backend.is_sim else 2)  # simulated actors have tasks here, too: one for each slot
            await workers.open.call()
            assert sorted([index async for index, _ in results]) == list(range(40))


# ---- failures --------------------------------------------------------------------------------------------------------


async def test_first_failure_stops_the_map(backend: Backend):
    """E01, S05, X1: one group, which names item and rank; what came before it was given; the rest is cancelled."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        found = []
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.fail_on.map([0, 1, 2, 8, 9, 3, 7, 4], window=2) as results:
                async for index, value in results:
                    found.append((index, value))
                    if len(found) == 3:
                        await workers.wait.call("holding", 1)
                        await workers.slice(gpus=0).open.call()
        assert sorted(found[:3]) == [(0, 0), (1, 1), (2, 2)]
        assert kinds(caught.value) == [ValueError]
        [error] = caught.value.exceptions
        assert "raised for item 5 of workers.fail_on.map()" in error.__notes__
        assert len(trimesh.coords(error)) == 1
        assert (caught.value.mesh, caught.value.endpoint) == ("workers", "fail_on")
        assert all(running == 0 for running, _, _ in (await workers.report.call()).values())
        assert len((await workers.square.call(1)).values()) == 2


async def test_collect_goes_on(backend: Backend):
    """S06: after the last result one group with all failures."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        await workers.open.call()
        found = []
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.fail_on.options(merge="collect", window=2).map(range(20)) as results:
                async for index, value in results:
                    found.append((index, value))
        assert sorted(found) == [(number, number) for number in range(20) if number not in (3, 4)]
        assert sorted(error.args[0] for error in caught.value.exceptions) == [3, 4]
        with pytest.raises(MeshErrorGroup) as caught:  # although none of them makes room by its result
            async with workers.fail_on.options(merge="collect", window=1).map([3, 4]) as results:
                await anext(results)
        assert [error.args[0] for error in caught.value.exceptions] == [3, 4]


async def test_error_of_the_items_is_raised(backend: Backend):
    """C7: what came before it is given, what runs is cancelled; it has no coordinates."""

    async def items() -> AsyncIterator[int]:
        yield 1
        await gate.wait()
        raise KeyError("items")

    gate = trio.Event()
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.square.map(items()) as results:
                async for result in results:
                    assert result == (0, 1)
                    gate.set()
        assert kinds(caught.value) == [KeyError]
        assert trimesh.coords(caught.value) == []


async def test_item_that_cannot_be_sent_is_named(backend: Backend):
    """V2."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.square.map([1, trio.lowlevel.current_task(), 3]) as results:
                async for _ in results:
                    pass
        [error] = caught.value.exceptions
        assert isinstance(error, TypeError)
        assert [note for note in error.__notes__ if "item" in note] == ["raised for item 1 of workers.square.map()"]


@only_sim
async def test_item_that_comes_after_a_death_goes_to_another_member(backend: SimBackend):
    """C7, X3: the members that live are those of the moment when an item is there."""
    send, receive = trio.open_memory_channel[int](0)
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.where.map(receive) as results:
            await send.send(0)
            _, (rank, _) = await anext(results)
            backend.kill(procs, rank)
            await trio.sleep(1)
            for number in range(1, 4):
                await send.send(number)
                assert await anext(results) == (number, (1 - rank, number))


async def test_death_of_a_member(backend: Backend):
    """X3: the owner's block raises it; a holder elsewhere gets the error of the item."""
    async with backend.procs({"gpus": 1}) as others:
        mapper = await others.spawn("mapper", Mapper)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup) as owners:
                async with backend.procs({"gpus": 2}) as procs:
                    workers = await procs.spawn("workers", Worker)
                    mapping = attempt(nursery, mapper.map.call_one, workers)
                    await workers.wait.call("holding")
                    async with workers.hold.map(range(10), window=10) as results:
                        await workers.wait.call("holding", 6)
                        backend.kill(procs, 1)
                        await anext(results)
            assert kinds(owners.value) == [ProcDied]
            assert set(await mapping.result()) <= {"ProcDied", "MeshStopped", "RemoteCancelled"}


class Mapper(Actor):
    @endpoint
    async def map(self, workers: Worker) -> list[str]:
        """Map over a mesh of somebody else; return the names of the errors."""
        try:
            async with workers.hold.map(range(2)) as results:
                async for _ in results:
                    pass
        except MeshErrorGroup as group:
            return [type(leaf).__name__ for leaf in trimesh.leaves(group)]
        return []


async def test_stopped_and_empty_meshes(backend: Backend):
    """M3, M6."""
    async with backend.procs({"gpus": 2}) as procs:
        async with procs.spawn("workers", Worker) as workers:
            with pytest.raises(ValueError, match="empty view"):
                workers.slice(gpus=slice(0, 0)).square.map([1])
            async with workers.square.map([]) as results:
                assert [result async for result in results] == []
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.square.map([1]):
                raise AssertionError
        assert kinds(caught.value) == [MeshStopped] * 2


# ---- use -------------------------------------------------------------------------------------------------------------


async def test_what_cannot_work_is_refused_at_once(backend: Backend):
    """API 3."""
    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(TypeError, match=r"one argument, the item: .*two.*such as a tuple"):
            workers.pair.map([1])
        with pytest.raises(TypeError, match="iterate"):
            workers.square.map(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="window"):
            workers.square.map([3], window=0)


async def test_every_step_is_a_checkpoint(backend: Backend):
    """K01, K03."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        for items in ([], [1, 2, 3]):
            results = workers.square.map(items)
            with trio.testing.assert_checkpoints():
                await results.__aenter__()
            while True:
                with trio.testing.assert_checkpoints():
                    if await anext(results, None) is None:
                        break
            with trio.testing.assert_checkpoints():
                await results.__aexit__(None, None, None)
        with trio.CancelScope() as scope:
            scope.cancel()
            async with workers.square.map([1]):
                raise AssertionError
        assert scope.cancelled_caught


async def test_cancelled_step_loses_no_result(backend: Backend):
    """S02: who is cancelled while it waits, and goes on afterwards, gets every result."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(range(100)) as results:
            found = []
            while len(found) < 100:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    found.append(await anext(results))
                with trio.move_on_after(0.001):
                    found.append(await anext(results))
        assert sorted(found) == [(index, index * index) for index in range(100)]
        async with workers.square.map(range(3)) as results:
            found = [await anext(results)]
            await trio.testing.wait_all_tasks_blocked(0.01)  # the others have ended
            with trio.CancelScope() as scope:
                scope.cancel()
                found.append(await anext(results))
            assert scope.cancelled_caught
            assert len(found) == 1


async def test_items_get_the_time_that_is_left(backend: Backend):
    """C3: a budget, which counts from when it arrives; clocks of two processes have nothing in common."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with trio.fail_after(60):
            async with workers.time_left.map(range(4)) as results:
                left = [seconds async for _, seconds in results]
        assert all(0 < seconds <= 60 for seconds in left), left
