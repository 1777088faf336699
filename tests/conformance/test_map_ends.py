"""Maps that are left early, and items that are tried again (rules C2, C6, C7; C01, C12, D01, E08, S04)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.mapping import Worker
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, only_sim
from tests.conformance.probe import Notes

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, MeshStopped, Retry, endpoint, limits
from trimesh._runtime.life.current import current_proc

# ---- leaving early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "exception", "cancel", "items"])
async def test_leaving_early_cancels_and_joins(backend: Backend, how: str):
    """S04, C01."""
    closed = []

    async def endless() -> AsyncIterator[int]:
        try:
            for number in range(4):
                yield number
            await trio.sleep_forever()
        finally:
            closed.append("items")

    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        error = None
        with trio.CancelScope() as scope:
            try:
                async with workers.hold.map(endless() if how == "items" else range(4)) as results:
                    await workers.wait.call("holding", 2)
                    if how == "exception":
                        raise KeyError("body")
                    if how == "cancel":
                        scope.cancel()
                        await anext(results)
            except KeyError as raised:
                error = raised
        assert (error is not None) == (how == "exception")
        assert scope.cancelled_caught == (how == "cancel")
        assert [report[:2] for report in (await workers.report.call()).values()] == [(0, 2)] * 2
        assert closed == (["items"] if how == "items" else [])


async def test_error_while_cancelling_is_not_masked(backend: Backend):
    """E08: it names its item."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(MeshErrorGroup) as caught, trio.CancelScope() as scope:
            async with workers.fail_at_the_end.map(range(2)) as results:
                await workers.wait.call("holding")
                scope.cancel()
                await anext(results)
        assert kinds(caught.value) == [ValueError] * 2
        for error in caught.value.exceptions:
            assert f"raised for item {error.args[0]} of workers.fail_at_the_end.map()" in error.__notes__


async def test_consumer_behind_a_shield_does_not_wait_for_ever(backend: Backend):
    """K03: the items stop coming when the scope around the map is cancelled."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with trio.CancelScope() as scope:
            async with workers.hold.map(range(2)) as results:
                await workers.wait.call("holding")
                scope.cancel()
                with trio.CancelScope(shield=True), pytest.raises(MeshErrorGroup) as caught:
                    await anext(results)
        assert scope.cancelled_caught
        assert kinds(caught.value) == [trimesh.RemoteCancelled]


async def test_leaving_ends_the_wait_of_another_task_at_once(backend: Backend):
    """S04: before the items have cleaned up."""

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await other.over.wait()

    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        workers = await procs.spawn("workers", Worker)
        async with workers.square.map(items()) as results:
            assert await anext(results) == (0, 1)
            other = attempt(nursery, anext, results)
            await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(trio.ClosedResourceError):
            await other.result()


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_error_of_the_items_clean_up_is_raised(backend: Backend, *, is_async: bool, is_cancelled: bool):
    """S04, E08: by the block, beside no other error, also when that is cancelled."""

    async def items_async() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise KeyError("items")

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise KeyError("items")

    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(MeshErrorGroup) as caught, trio.CancelScope() as scope:
            async with workers.hold.map(items_async() if is_async else items(), window=2) as results:
                await workers.wait.call("holding", 2)
                if is_cancelled:
                    scope.cancel()
                    await anext(results)
        assert kinds(caught.value) == [KeyError]


@only_sim
async def test_failed_map_waits_at_most_the_bound(backend: SimBackend):
    """C2, S05: for the items beside the one that has failed; what they did is not known."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("deaf", Deaf)
        start = trio.current_time()
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.sleep.map([1.0, -1.0]) as results:
                await anext(results)
        assert kinds(caught.value) == [ValueError]  # the other one has ended in time
        assert trio.current_time() - start == 1.0
        start = trio.current_time()
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.sleep.map([60.0, -1.0]) as results:
                await anext(results)
        assert kinds(caught.value) == [ValueError, trimesh.Unresponsive]
        assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
        await trio.sleep(60)


@only_sim
async def test_leaving_waits_at_most_the_bound(backend: SimBackend):
    """C2, C12."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("deaf", Deaf)
        dropped = current_proc().dropped_replies
        start = trio.current_time()
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.sleep.map([60.0, 60.0, 60.0]):
                await workers.started.call()
        assert kinds(caught.value) == [trimesh.Unresponsive] * 2  # the third was in the mailbox
        assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
        await trio.sleep(60)
        assert current_proc().dropped_replies == dropped + 2


class Deaf(Actor):
    def __init__(self) -> None:
        self.notes = Notes()

    @endpoint
    async def sleep(self, seconds: float) -> None:
        self.notes.add("started")
        if seconds < 0:
            raise ValueError(seconds)
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    @endpoint(concurrency=10)
    async def started(self) -> None:
        await self.notes.wait("started")


async def test_deadline_ends_a_map(backend: Backend):
    """D01, D06."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(0.5):
                async with workers.hold.map(range(4)) as results:
                    async for _ in results:
                        raise AssertionError
        assert [running for running, _, _ in (await workers.report.call()).values()] == [0, 0]


# ---- retry -----------------------------------------------------------------------------------------------------------


@pytest.mark.daily("real")
async def test_failed_items_are_tried_elsewhere(backend: Backend):
    """C6, S02: other members are preferred; each item has one result."""
    async with backend.procs({"gpus": 3}) as procs:
        workers = await procs.spawn("workers", Worker)
        before = current_proc().metrics.retries
        handle = workers.flaky.options(retry=Retry(2, on=ConnectionError))
        async with handle.map(range(12)) as results:
            found = [(index, value) async for index, value in results]
        assert sorted(found) == [(index, (2, index)) for index in range(12)]
        logs = [log for _, _, log in (await workers.report.call()).values()]
        assert all(len(log) == len(set(log)) for log in logs)
        assert current_proc().metrics.retries == before + sum(map(len, logs)) - 12


async def test_item_that_fails_too_often_fails_the_map(backend: Backend):
    """C6: with the errors of all attempts as context."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = (await procs.spawn("workers", Worker)).slice(gpus=0)
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.flaky.options(retry=Retry(2, on=ConnectionError, backoff=0.01)).map([7]) as results:
                async for _ in results:
                    raise AssertionError
        [error] = caught.value.exceptions
        chain = [error]
        while (context := chain[-1].__context__) is not None:
            chain.append(context)
        assert [type(one) for one in chain] == [ConnectionError] * 3
        assert (await workers.report.call_one())[2] == [7, 7, 7]


async def test_items_are_not_tried_again_once_the_map_has_failed(backend: Backend):
    """C6, S05: what they raise as they are cancelled is reported beside its error."""
    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        handle = workers.fail_late.options(retry=Retry(2, on=ConnectionError, backoff=0.0))
        with pytest.raises(MeshErrorGroup) as caught:
            async with handle.map([ConnectionError(), ValueError()]) as results:
                await anext(results)
        assert kinds(caught.value) == [ValueError, ConnectionError]
        assert sorted((await workers.report.call_one())[2]) == ["ConnectionError", "ValueError"]


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_error_that_no_attempt_follows(backend: Backend, how: str):
    """C6, C01, S04: raised by a block that was left; one that is cancelled might have tried it again."""
    async with backend.procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        handle = workers.fail_late.options(retry=Retry(2, on=ConnectionError))
        error = None
        with trio.CancelScope() as scope:
            try:
                async with handle.map([ConnectionError()]) as results:
                    await workers.wait.call("ConnectionError")
                    if how == "cancel":
                        scope.cancel()
                        await anext(results)
            except MeshErrorGroup as group:
                error = group
        assert scope.cancelled_caught == (how == "cancel")
        assert (error is None) == (how == "cancel")
        assert error is None or kinds(error) == [ConnectionError]


@only_sim
async def test_attempt_that_cannot_be_sent_ends_its_item(backend: SimBackend):
    """C6, S06: while nothing else runs; with the earlier error as context, and the item in a note."""
    async with backend.procs({"gpus": 1}, supervision=Isolate()) as procs:
        workers = await procs.spawn("workers", Worker)
        handle = workers.long.options(retry=Retry(2, on=ConnectionError, backoff=2.0), merge="collect")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _kill() -> None:
                await trio.sleep(1.0)
                backend.kill(procs, 0)

            with pytest.raises(MeshErrorGroup) as caught:
                async with handle.map([10]) as results:
                    await anext(results)
        [error] = caught.value.exceptions
        assert isinstance(error, MeshStopped)
        assert isinstance(error.__context__, ConnectionError)
        assert "raised for item 0 of workers.long.map()" in error.__notes__


async def test_cancel_ends_a_wait_for_the_next_attempt(backend: Backend):
    """C01: a wait between two attempts, too."""
    async with backend.procs({"gpus": 2}) as procs:
        workers = (await procs.spawn("workers", Worker)).slice(gpus=0)
        with trio.move_on_after(0.3) as scope:
            async with workers.flaky.options(retry=Retry(2, on=ConnectionError, backoff=1_000.0)).map([7]) as results:
                async for _ in results:
                    raise AssertionError
        assert scope.cancelled_caught


@only_sim
async def test_who_lives_is_looked_up_after_each_wait(backend: Backend):
    """An item that is sent again leaves nothing behind that the next one, much later, would rely on."""
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs:
        workers = await procs.spawn("workers", Worker)
        found: list[Any] = []
        handle = workers.long.options(retry=Retry(2, on=ConnectionError, backoff=1.0))
        async with trio.open_nursery() as nursery, handle.map([10, 5, 1], window=2) as results:

            async def collect() -> None:
                found.extend([item async for item in results])

            nursery.start_soon(collect)
            await trio.sleep(3.0)  # the first has been sent again, to rank 1, where the second is, too
            backend.kill(procs, 0)
            await trio.sleep(12.0)
        assert found == [(1, (1, 5)), (2, (1, 1)), (0, (1, 10))]
