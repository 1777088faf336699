"""Streams that fail: what is raised, where, and after which items (S05, S06, E01-E09, M3, X1, X3)."""

from __future__ import annotations

import contextvars
import io
from collections import defaultdict
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, only_sim
from tests.conformance.producing import Producer, Unpicklable, collect

import trimesh
from trimesh import Actor, MeshErrorGroup, MeshStopped, PayloadError, ProcDied, RemoteError, endpoint


@pytest.mark.parametrize("count", [0, 1, 150])
async def test_error_comes_after_the_items_before_it(backend: Backend, count: int):
    """S05, E01, X1: one group, with coordinates, which the block does not wrap again; the others are cancelled."""
    async with backend.procs({"gpus": 3}) as procs:
        producers = await procs.spawn("producers", Producer)
        found: dict[int, list[int]] = defaultdict(list)
        raised: list[BaseException] = []
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.fail_after.stream(count, ValueError("boom"), [1]) as results:
                try:
                    async for point, number in results:
                        found[point.rank].append(number)
                except MeshErrorGroup as group:
                    raised.append(group)
                    assert await is_over(results)
                    raise
        assert caught.value is raised[0]
        assert kinds(caught.value) == [ValueError]
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert (caught.value.mesh, caught.value.endpoint) == ("producers", "fail_after")
        assert found[1] == list(range(count))
        assert all(numbers == list(range(len(numbers))) for numbers in found.values())
        for rank in (0, 2):
            log = await producers.slice(gpus=rank).seen.call_one()
            assert log.count("failing") == log.count("unwound")


async def is_over(results: Any) -> bool:
    return [result async for result in results] == []


async def test_all_errors_that_happened_are_in_the_group(backend: Backend):
    """E02."""
    async with backend.procs({"gpus": 4}) as procs:
        producers = await procs.spawn("producers", Producer)
        async with trio.open_nursery() as nursery:

            async def consume() -> None:
                async with producers.fail_at_gate.stream(ValueError("boom"), [0, 1, 3]) as results:
                    await collect(results)

            failing = attempt(nursery, consume)
            await producers.wait.call("at the gate")
            await producers.open_gate.call()
            with pytest.raises(MeshErrorGroup) as caught:
                await failing.result()
        assert set(kinds(caught.value)) == {ValueError}
        assert [point["gpus"] for point in trimesh.coords(caught.value)] == [0, 1, 3]


async def test_collect_lets_the_others_go_on(backend: Backend):
    """S06: after the last item one group with all failures."""
    async with backend.procs({"gpus": 4}) as procs:
        producers = await procs.spawn("producers", Producer)
        handle = producers.fail_or_finish.options(merge="collect")
        found: dict[int, list[int]] = defaultdict(list)
        with pytest.raises(MeshErrorGroup) as caught:
            async with handle.stream(100, ValueError("boom"), [1, 2]) as results:
                async for point, number in results:
                    found[point.rank].append(number)
        assert {rank: len(numbers) for rank, numbers in found.items()} == {0: 200, 1: 100, 2: 100, 3: 200}
        assert [point["gpus"] for point in trimesh.coords(caught.value)] == [1, 2]


async def test_error_that_nobody_waits_for_cancels_the_others_at_once(backend: Backend):
    """S05: also while the body does something else; the block raises it if the body does not."""
    async with backend.procs({"gpus": 2}) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.fail_when_told.stream(ValueError("boom")):
                await producers.wait.call("holding")
                await producers.slice(gpus=1).open_gate.call_one()
                await producers.slice(gpus=0).wait.call_one("unwound")
        assert kinds(caught.value) == [ValueError]


async def test_error_of_the_body_is_beside_those_of_the_producers(backend: Backend):
    """E09, X1."""
    async with backend.procs({"gpus": 1}) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.fail_at_the_end.stream(ValueError("late")) as results:
                await producers.wait.call("holding")
                await anext(results)
                raise KeyError("body")
        assert kinds(caught.value) == [KeyError, ValueError]
        assert len(trimesh.coords(caught.value)) == 1


async def test_error_while_cancelling_is_not_masked(backend: Backend):
    """E08."""
    async with backend.procs({"gpus": 1}) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught, trio.CancelScope() as scope:
            async with producers.fail_at_the_end.stream(ValueError("late")):
                await producers.wait.call("holding")
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert kinds(caught.value) == [ValueError]


async def test_item_that_cannot_be_sent_fails_at_its_yield(backend: Backend):
    """E05, V2: the generator may go on; if it does not, the consumer gets the `TypeError`."""
    async with backend.procs({"gpus": 1}) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.yield_lock.stream() as results:
                assert (await anext(results))[1] == 1
                await anext(results)
        assert kinds(caught.value) == [TypeError]
        assert "an item of yield_lock()" in str(caught.value.exceptions[0])


@pytest.mark.by_value
@pytest.mark.parametrize("merge", ["fail_fast", "collect"])
async def test_item_that_cannot_be_rebuilt_is_a_failure(backend: Backend, merge: Any):
    """E05: never a crash; with coordinates."""
    async with backend.procs({"gpus": 1}) as procs:
        producers = await procs.spawn("producers", Odd)
        found = []
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.odd.options(merge=merge).stream() as results:
                async for _, number in results:
                    found.append(number)
        assert found == ([1] if merge == "fail_fast" else [1, 3])
        assert kinds(caught.value) == [PayloadError]
        assert trimesh.coords(caught.value) == [{"gpus": 0}]
        assert await producers.alive_too.call_one() == 1


class Odd(Actor):
    @endpoint
    async def odd(self):
        yield 1
        yield Unpicklable()
        yield 3

    @endpoint
    async def alive_too(self) -> int:
        return 1


async def test_ends_of_python_arrive_as_remote_errors(backend: Backend):
    """E06."""
    async with backend.procs({"gpus": 1}) as procs:
        producers = await procs.spawn("producers", Producer)
        for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
            with pytest.raises(MeshErrorGroup) as caught:
                async with producers.fail_after.stream(1, error) as results:
                    await collect(results)
            assert kinds(caught.value) == [RemoteError]
        assert await producers.rank.call_one() == 0


async def test_refused_and_stopped_streams(backend: Backend):
    """M3: after its block, in a group like that of `call`."""
    async with backend.procs({"gpus": 2}) as procs:
        async with procs.spawn("producers", Producer) as producers:
            pass
        for name in ("rank", "endless"):
            with pytest.raises(MeshErrorGroup) as caught:
                async with getattr(producers, name).stream():
                    raise AssertionError
            assert kinds(caught.value) == [MeshStopped] * 2


async def test_death_ends_a_stream(backend: Backend):
    """X3: the block that owns the process raises it, its streams end by that cancel; a holder elsewhere gets it."""
    async with backend.procs({"gpus": 1}) as others:
        consumer = await others.spawn("consumer", Producer)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup) as owners:
                async with backend.procs({"gpus": 2}) as procs:
                    producers = await procs.spawn("producers", Producer)
                    gathering = attempt(nursery, consumer.consume_forever.call_one, producers)
                    await consumer.wait.call_one("consumed", 200)
                    async with producers.endless.stream() as results:
                        for _ in range(100):
                            await anext(results)
                        backend.kill(procs, 1)
                        async for _ in results:
                            await trio.sleep(0.001)  # virtual time stands still while somebody runs
            assert kinds(owners.value) == [ProcDied]
            with pytest.raises(MeshErrorGroup) as elsewhere:
                await gathering.result()
        assert set(kinds(elsewhere.value)) <= {ProcDied, MeshStopped, trimesh.RemoteCancelled}


async def test_death_of_the_consumer_ends_the_producers(backend: Backend):
    """S04: they are cancelled, and the actor serves others."""
    async with backend.procs({"gpus": 1}) as procs:
        producer = await procs.spawn("producer", Producer)
        with pytest.raises(MeshErrorGroup):
            async with backend.procs({"gpus": 1}) as others:
                consumer = await others.spawn("consumer", Producer)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(consumer.consume_forever.call_one, producer)
                    await consumer.wait.call_one("consumed")
                    backend.kill(others, 0)
                    await trio.sleep_forever()
        await producer.wait.call_one("unwound")
        assert await producer.rank.call_one() == 0


# ---- who is cancelled, and by whom -----------------------------------------------------------------------------------


@only_sim
async def test_deadline_that_was_extended_is_told(backend: SimBackend):
    """C3: the producers end by the budget at opening, as errors, because the consumer's own scope does not expire."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught, trio.move_on_after(1) as scope:
            async with producers.hold_after.options(merge="collect").stream(1) as results:
                scope.deadline += 10
                await collect(results)
        assert [error.reason for error in trimesh.leaves(caught.value)] == ["budget at sending"] * 2


@pytest.mark.daily("real")
async def test_cancel_runs_through_the_consumer(backend: Backend):
    """C01, C10: the consumer is an endpoint; who cancels that cancels the producers, and leaves when they are done."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        consumer = (await procs.spawn("consumers", Producer)).slice(gpus=0)
        async with trio.open_nursery() as nursery:
            # It must have no deadline that could be over at that moment: Trio would give that as the reason.
            consuming = attempt(nursery, consumer.consume_and_stay.call_one, producers, 10)
            await consumer.wait.call_one("consumed", 10)
            await producers.wait.call("produced")
            consuming.cancel("enough")
        assert consuming.cancelled
        for log in (await producers.seen.call()).values():
            assert log[-1] == "unwound"
            [reason] = [note[2] for note in log if isinstance(note, tuple)]
            assert "enough" in reason


async def test_dump_names_streams(backend: Backend):
    """M4: with endpoint, point and age, like any unended call."""
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.hold_after.stream(1):
            await producers.wait.call("holding")
            text = io.StringIO()
            trimesh.dump(text)
    assert text.getvalue().count("call producers.hold_after to ") == 2


async def test_ports_in_items_that_nobody_takes_are_given_back(backend: Backend):
    """T2: whether they wait at the consumer, are under way, or come when the stream is over."""
    async with backend.procs() as procs:
        senders = await procs.spawn("senders", Senders)
        async with trimesh.open_channel(int, capacity=10) as (port, receiver):
            async with senders.ports.stream(port, 0.0) as results:
                await anext(results)
            with trio.move_on_after(0.3 if backend.is_sim else 0.1):
                async with senders.ports.stream(port, 7.0 if backend.is_sim else 0.0) as results:
                    await collect(results)
            await port.aclose()
            assert [number async for number in receiver] == []


async def test_context_of_a_generator_is_its_own(backend: Backend):
    """What it sets is there after each `yield`, and nowhere else."""
    async with backend.procs({"gpus": 1}) as procs:
        tagged = await procs.spawn("tagged", Tagged)
        async with tagged.mark.stream("one") as one, tagged.mark.stream("two") as two:
            for _ in range(3):
                assert (await anext(one))[1] == "one"
                assert (await anext(two))[1] == "two"
        assert await tagged.look.call_one() == "none"


class Senders(Actor):
    @endpoint(concurrency=3)
    async def ports(self, port: Any, seconds: float):
        """Yield ports, and another one when cancelled, after some time."""
        try:
            for _ in range(20):
                yield port
            await trio.sleep_forever()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            yield port
            raise


tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="none")


class Tagged(Actor):
    @endpoint(concurrency=3)
    async def mark(self, value: str):
        tag.set(value)
        for _ in range(3):
            yield tag.get()

    @endpoint(concurrency=3)
    async def look(self) -> str:
        return tag.get()
