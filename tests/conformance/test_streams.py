"""Streams: order, windows, early leaving, failures (S01-S06; rules T1, M5, M6; C, D and E for streams)."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, member, only_sim
from tests.conformance.producing import Producer, collect

import trimesh
from trimesh import Actor, MeshErrorGroup, endpoint, limits, this_proc
from trimesh._runtime.life.current import current_proc

# ---- what comes ------------------------------------------------------------------------------------------------------


async def test_plain_endpoint_gives_one_result_per_rank(backend: Backend):
    """S06, API 3."""
    async with backend.procs({"gpus": 3}) as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.note.stream("hello") as results:
            found = [(point, value) async for point, value in results]
    assert sorted((point["gpus"], value) for point, value in found) == [(rank, "hello") for rank in range(3)]


async def test_results_come_as_they_are_ready(backend: Backend):
    """API 3: a slow rank keeps no other waiting."""
    async with backend.procs({"gpus": 3}) as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.wait_for_gate.stream() as results:
            for rank in (2, 0, 1):
                await producers.slice(gpus=rank).open_gate.call_one()
                point, value = await anext(results)
                assert (point["gpus"], value) == (rank, "gate")
            with pytest.raises(StopAsyncIteration):
                await anext(results)


@pytest.mark.daily("sim-typed")
@pytest.mark.daily("real")
async def test_generator_gives_many_per_rank_in_order(backend: Backend):
    """S01, S06: many windows of items; a stream ends when all ranks have ended."""
    upto = 3 * limits.STREAM_WINDOW
    async with backend.procs({"gpus": 3}) as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.count.stream(upto, ranks=[0, 2]) as results:
            found = await collect(results)
    assert found == {0: list(range(upto)), 2: list(range(upto))}


async def test_points_are_those_of_the_view(backend: Backend):
    """M5."""
    async with backend.procs({"gpus": 4}) as procs:
        producers = await procs.spawn("producers", Producer)
        view = producers.slice(gpus=slice(1, 4)).rename(gpus="tp").exclude([{"tp": 1}])
        async with view.rank.stream() as results:
            found = {point: value async for point, value in results}
        assert {(point["tp"], value) for point, value in found.items()} == {(0, 1), (2, 3)}
        async with view.count.stream(1) as results:
            assert {point async for point, _ in results} == set(found)
        assert [point["gpus"] for point in producers.exclude(list(found)).points()] == [0, 2]


async def test_empty_view_gives_nothing(backend: Backend):
    """M6."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        for name in ("rank", "endless"):
            async with getattr(producers.slice(gpus=slice(0, 0)), name).stream() as results:
                assert [result async for result in results] == []


async def test_large_items_arrive_as_they_were_yielded(backend: Backend):
    """V1: the generator writes into the array again as soon as its `yield` returns."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        for size, count in ((1_000, 40), (300_000, 60)):
            async with producers.refill.stream(size, count) as results:
                found = await collect(results)
            for arrays in found.values():
                assert [(array.shape, int(array[0]), int(array[-1])) for array in arrays] == [
                    ((size,), number, number) for number in range(count)
                ]


async def test_stream_of_the_own_process(backend: Backend):
    """M7."""
    del backend
    async with this_proc().spawn("producer", Producer) as producer, producer.count.stream(200) as results:
        assert await collect(results) == {0: list(range(200))}


async def test_stream_through_a_reference(backend: Backend):
    """API 1: a reference can call, slice and stream."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Producer)
        consumer = (await procs.spawn("consumers", Producer)).slice(gpus=0)
        found = await consumer.gather.call_one(producers, 100)
        for rank in range(2):
            assert [number for where, number in found if where == rank] == list(range(100))


async def test_generator_inside_the_actor_is_the_plain_one(backend: Backend):
    """C5."""
    async with backend.procs({"gpus": 1}) as procs:
        lists = await procs.spawn("lists", Lists)
        assert await lists.doubled.call_one(3) == [0, 2, 4]


class Lists(Actor):
    @endpoint
    async def count(self, upto: int):
        for number in range(upto):
            yield number

    @endpoint
    async def doubled(self, upto: int) -> list[int]:
        return [2 * number async for number in self.count(upto)]


# ---- slots and windows -----------------------------------------------------------------------------------------------


async def test_generator_holds_its_slot_until_it_ends(backend: Backend):
    """T1, S08."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with trio.open_nursery() as nursery:
            async with producer.count.options(window=1).stream(3) as results:
                await anext(results)
                waiting = attempt(nursery, producer.note.call_one, "later")
                await trio.testing.wait_all_tasks_blocked(0.01 if not backend.is_sim else 0.0)
                assert "later" not in await producer.seen.call_one()
                assert [number async for _, number in results] == [1, 2]
            assert await waiting.result() == "later"


async def test_slow_consumer_stops_a_fast_producer(backend: Backend):
    """S03, T1: the producer is exactly its window ahead, whatever the window, and goes on when items are taken."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        base = 0
        for window in (None, 1, 2, 5, 200):
            handle = producer.endless if window is None else producer.endless.options(window=window)
            ahead = window or limits.STREAM_WINDOW
            async with handle.stream() as results:
                await producer.wait_produced.call_one(base + ahead)
                await settle(backend)
                assert await producer.count_produced.call_one() == base + ahead
                for taken in range(1, 2 * ahead + 1):
                    assert (await anext(results))[1] == base + taken
                await producer.wait_produced.call_one(base + 2 * ahead + 1)
                await settle(backend)
                assert await producer.count_produced.call_one() <= base + 3 * ahead
            base = await producer.count_produced.call_one()


async def settle(backend: Backend) -> None:
    """Give a producer that does not stop the chance to show it."""
    if backend.is_sim:
        await trio.testing.wait_all_tasks_blocked()
    else:
        await trio.sleep(0.05)


async def test_large_items_are_bounded_by_bytes(backend: Backend):
    """S03: at most `STREAM_BYTES` and the one item that waits in its `yield` are ahead, whatever the window."""
    size = 1 << 20
    bound = limits.STREAM_BYTES // size + 1
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.endless.stream(size) as results:
            for taken in range(30):
                await producer.wait_produced.call_one(taken + bound - 2)
                await settle(backend)
                assert await producer.count_produced.call_one() <= taken + bound
                _, array = await anext(results)
                assert array[0] == taken + 1


async def test_item_above_the_bound_goes_alone(backend: Backend):
    """S03: an item larger than `STREAM_BYTES` is sent when little else is ahead."""
    size = limits.STREAM_BYTES + 1
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.endless.stream(size) as results:
            for taken in range(3):
                _, array = await anext(results)
                assert (array.size, array[-1]) == (size, taken + 1)
                await settle(backend)
                assert await producer.count_produced.call_one() <= taken + 3


async def test_yield_is_a_checkpoint(backend: Backend):
    """T1, C02: a generator that never waits for anything else is cancelled in its `yield`."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.endless.options(window=10_000).stream() as results:
            await anext(results)
        assert "unwound" in await producer.seen.call_one()
        assert [note[1] for note in await producer.seen.call_one() if isinstance(note, tuple)] == ["Cancelled"]


async def test_cancel_scope_around_a_yield_works(backend: Backend):
    """T1: a deadline of the generator's own passes while it waits in its `yield`."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.within.options(window=2).stream(1000.0) as results:
            await producer.wait_produced.call_one(2)
            await settle(backend)  # it waits in its second `yield` by then; else this shows less
            await producer.expire.call_one()
            assert [number async for _, number in results] == [1, 2, -1]


# ---- leaving early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "exception", "cancel", "no iteration"])
async def test_leaving_early_cancels_and_joins_the_producers(backend: Backend, how: str):
    """S04: they have unwound when the block is over; nothing is told but the body's own error."""
    async with backend.procs({"gpus": 3}) as procs:
        producers = await procs.spawn("producers", Producer)
        error = None
        with trio.CancelScope() as scope:
            try:
                async with producers.endless.stream() as results:
                    await producers.wait_produced.call(1)
                    if how != "no iteration":
                        async for _ in results:
                            if how == "break":
                                break
                            if how == "exception":
                                raise KeyError("body")
                            scope.cancel(reason="enough")
            except KeyError as raised:
                error = raised
        assert (error is not None) == (how == "exception")
        assert scope.cancelled_caught == (how == "cancel")
        for log in (await producers.seen.call()).values():
            assert log[-1] == "unwound"
            [(_, ended_by, reason)] = [note for note in log if isinstance(note, tuple)]
            assert ended_by == "Cancelled"
            assert ("enough" in reason) == (how == "cancel")
        assert list((await producers.rank.call()).values()) == [0, 1, 2]


async def test_leaving_takes_back_what_was_not_started(backend: Backend):
    """S04, C11: a stream that waits for a slot never runs."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, producer.hold.call_one)
            await producer.wait.call_one("hold")
            async with producer.count.stream(5):
                pass
            held.cancel()
        assert await producer.rank.call_one() == 0


@only_sim
async def test_leaving_waits_for_the_slowest(backend: SimBackend):
    """S04, C01, C2: and for at most the bound; who is silent then is told of by name."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Slow)
        start = trio.current_time()
        async with producers.slow.stream(3.0) as results:
            await anext(results)
        assert trio.current_time() - start == 3.0
        dropped = current_proc().dropped_replies
        start = trio.current_time()
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.slow.stream(60.0) as results:
                await anext(results)
        assert kinds(caught.value) == [trimesh.Unresponsive] * 2
        assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
        start = trio.current_time()
        with trio.move_on_after(1) as scope:
            async with producers.slow.stream(60.0) as results:
                await collect(results)
        assert scope.cancelled_caught
        assert trio.current_time() - start == 1 + limits.CANCEL_ACK_SECONDS
        await trio.sleep(60)
        assert current_proc().dropped_replies == dropped + 4  # C12


class Slow(Actor):
    @endpoint(concurrency=10)
    async def slow(self, seconds: float):
        """Yield once; take some time to unwind, and yield once more then."""
        try:
            yield 0
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)


async def test_leaving_lets_other_streams_be(backend: Backend):
    """C03."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.endless.stream() as first, producers.endless.stream() as second:
            await anext(first)
            async with producers.endless.stream() as third:
                await anext(third)
            for results in (first, second):
                for _ in range(200):
                    await anext(results)


# ---- time ------------------------------------------------------------------------------------------------------------


async def test_deadline_travels(backend: Backend):
    """D01, D03, D06: the generator sees it and ends by it."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(1.0):
                async with producers.deadline.stream() as results:
                    async for _, left in results:
                        assert left <= 1.0  # it may look when its time is just over


@only_sim
async def test_deadline_ends_the_stream_without_a_cancel(backend: SimBackend):
    """D01: the cancel is lost; the producers have unwound by themselves when the consumer leaves."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Producer)
        await producers.rank.call()
        for rank in range(2):
            backend.lag.links[current_proc().proc_id, member(producers, rank).proc_id] = (1_000.0, 0.0)
        start = trio.current_time()
        with trio.move_on_after(2) as scope:
            async with producers.hold_after.stream(1) as results:
                await collect(results)
        assert scope.cancelled_caught
        assert trio.current_time() - start == 2
        backend.lag.links.clear()


@only_sim
async def test_expired_budget_never_starts(backend: SimBackend):
    """D04."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, producer.hold.call_one)
            await producer.wait.call_one("hold")
            with trio.move_on_after(1) as scope:
                async with producer.count.stream(3) as results:
                    await collect(results)
            assert scope.cancelled_caught
            held.cancel()
        assert await producer.rank.call_one() == 0


# ---- use -------------------------------------------------------------------------------------------------------------


async def test_arguments_are_bound_and_encoded_at_the_caller(backend: Backend):
    """API 3: `TypeError` at `stream(...)`, or, for what cannot be serialised, when the block is entered."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        with pytest.raises(TypeError, match="count"):
            producer.count.stream()
        with pytest.raises(TypeError, match="argument 'upto'"):
            async with producer.count.stream(trio.lowlevel.current_task()):
                raise AssertionError
        assert await producer.seen.call_one() == []


@pytest.mark.parametrize("verb", ["call", "call_settled", "call_one", "choose", "broadcast", "broadcast_nowait", "map"])
async def test_only_stream_calls_a_generator(backend: Backend, verb: str):
    """C5."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        with pytest.raises(TypeError, match="stream"):
            done = getattr(producer.count, verb)(3)
            await done


async def test_block_is_used_once_and_by_one_task(backend: Backend):
    """API 3: clear errors for what cannot work."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        stream = producer.hold_after.stream(2)
        with pytest.raises(RuntimeError, match="async with"):
            await anext(stream)
        async with trio.open_nursery() as nursery:
            async with stream as results:
                with pytest.raises(RuntimeError, match="once"):
                    async with stream:
                        raise AssertionError
                await anext(results)
                await anext(results)
                waiting = attempt(nursery, anext, results)
                await producer.wait.call_one("holding")
                with pytest.raises(trio.BusyResourceError):
                    await anext(results)
            with pytest.raises(trio.ClosedResourceError):
                await waiting.result()
        with pytest.raises(trio.ClosedResourceError):
            await anext(stream)
        with pytest.raises(RuntimeError, match="once"):
            async with stream:
                raise AssertionError


async def test_consumer_is_known(backend: Backend):
    """C8 needs it: the task that opened the stream, or has last waited for an item."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        me = trio.lowlevel.current_task()
        async with producer.hold_after.stream(1) as results:
            [stream] = current_proc().unended_calls()
            assert stream.consumer is me
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, results)
                await producer.wait.call_one("holding")
                await trio.testing.wait_all_tasks_blocked()
                assert stream.consumer in nursery.child_tasks
                nursery.cancel_scope.cancel()


async def test_every_step_is_a_checkpoint(backend: Backend):
    """K01, K03: entering, each item, the end, leaving; and each lets a cancel through."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        for view in (producers, producers.slice(gpus=slice(0, 0))):
            for stream in (view.count.stream(2), view.rank.stream()):
                with trio.testing.assert_checkpoints():
                    await stream.__aenter__()
                while True:
                    with trio.testing.assert_checkpoints():
                        if await anext(stream, None) is None:
                            break
                with trio.testing.assert_checkpoints():
                    await stream.__aexit__(None, None, None)
            with trio.CancelScope() as scope:
                scope.cancel()
                async with view.count.stream(2):
                    raise AssertionError
            assert scope.cancelled_caught
            with trio.CancelScope() as scope:
                async with view.count.stream(2) as results:
                    scope.cancel()
                    await anext(results)
                    raise AssertionError
            assert scope.cancelled_caught


async def test_cancelled_step_loses_no_item(backend: Backend):
    """S01: who is cancelled while it waits, and goes on afterwards, gets every item."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.count.stream(300) as results:
            found = []
            while len(found) < 300:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    found.append((await anext(results))[1])
                with trio.move_on_after(0.001):
                    found.append((await anext(results))[1])
            assert found == list(range(300))


async def test_items_of_a_numpy_kind_arrive_writable(backend: Backend):
    """V1."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        async with producer.refill.stream(200_000, 3) as results:
            async for _, array in results:
                array[:] += np.uint8(1)
