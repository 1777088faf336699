"""Streams of pools: one request each, whose items come in order, and whose generator ends with its consumer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.testing
from tests.service.test_pool import HEALED, both, until

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, MeshStopped, Overloaded, ProcDied, RemoteCancelled, endpoint
from trimesh.service import Affinity, Paused, PoolStatistics, open_pool
from trimesh.testing import simulate


class Generator(Actor):
    def __init__(self) -> None:
        self.live = 0
        self.sent = 0

    @endpoint(concurrency=8, group="streams")
    async def tokens(self, count: int, seconds: float = 0.0, first: float = 0.0) -> AsyncGenerator[Any, None]:
        self.live += 1
        try:
            await trio.sleep(first)
            for number in range(count):
                self.sent += 1
                yield number, trimesh.current_rank()
                await trio.sleep(seconds)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)  # clean-up that waits
            self.live -= 1

    @endpoint(concurrency=8, group="streams", idempotent=True)
    async def again(self, count: int, first: float) -> AsyncGenerator[int, None]:
        await trio.sleep(first)
        for number in range(count):
            yield number

    @endpoint(concurrency=8, group="streams")
    async def broken(self, count: int) -> AsyncGenerator[Any, None]:
        for _ in range(count):
            yield None
        raise ValueError(count)

    @endpoint(group="other")
    async def square(self, number: int) -> int:
        return number * number

    @endpoint(group="looks")
    async def look(self) -> tuple[int, int]:
        return self.live, self.sent


class Consumer(Actor):
    """Reads streams in another process than the pool's."""

    @endpoint
    async def read(self, pool: Any, count: int) -> list[int]:
        async with pool.session("of the consumer") as session:
            async with session.stream.tokens(count) as items:
                found = [number async for number, _ in items]
            assert not session.moved
        return found

    @endpoint
    async def fail(self, pool: Any, name: str, *args: Any) -> int:
        found = 0
        async with getattr(pool.options(when_full="refuse").stream, name)(*args) as items:
            async for _ in items:
                found += 1
        return found

    @endpoint(concurrency=2, group="long")
    async def read_on(self, pool: Any) -> None:
        async with pool.stream.tokens(1_000_000, 0.01) as items:
            async for _ in items:
                pass


async def live(mesh: Any) -> int:
    """Return how many generators run."""
    return sum([found for found, _ in (await mesh.look.call()).values()])


async def none_lives(mesh: Any) -> None:
    while await live(mesh):  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.01)


async def read(pool: Any, outcomes: list[Any], *args: Any) -> None:
    """Read a stream to its end; add its items, then the reason why it has ended."""
    found: list[int] = []
    try:
        async with pool.stream.tokens(*args) as items:
            async for number, _ in items:
                found.append(number)
        outcomes.append((found, "end"))
    except (Paused, MeshStopped, ProcDied) as error:
        outcomes.append((found, type(error).__name__))
    except RemoteCancelled as error:
        outcomes.append((found, error.reason))


def is_balanced(found: PoolStatistics) -> bool:
    over = found.succeeded + found.failed + found.cancelled + found.refused
    return found.made == over + found.running + found.reading + found.queued + found.arriving


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_items_of_one_replica_in_their_order(mesh):
    """Y14, Y15."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool:
        for stream in (pool.stream.tokens, pool.stream[Generator.tokens], pool.tokens.stream):
            async with stream(100) as items:
                found = [item async for item in items]
            assert [number for number, _ in found] == list(range(100))
            assert len({rank for _, rank in found}) == 1
        async with pool.session("s") as session:
            ranks: set[int] = set()
            for _ in range(4):
                async with session.stream.tokens(1) as items:
                    ranks |= {rank async for _, rank in items}
            assert len(ranks) == 1
            assert not session.moved
        statistics = pool.statistics()
        assert (statistics.made, statistics.succeeded, statistics.running, statistics.reading) == (7, 7, 0, 0)


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_leaving_ends_the_generator_and_frees_its_place(mesh):
    """Y14, Y16: early, by a cancel and by an error."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool:
        async with pool.stream.tokens(1_000_000) as items:
            async for number, _ in items:
                if number == 5:
                    break
            assert pool.statistics().running == 1
        assert await live(generators) == 0  # it has unwound
        with trio.CancelScope() as scope:
            async with pool.stream.tokens(1_000_000, 0.01) as items:
                async for number, _ in items:
                    if number == 3:
                        scope.cancel()
        assert scope.cancelled_caught
        assert await live(generators) == 0
        with pytest.raises(LookupError):
            async with pool.stream.tokens(3, 1.0):
                raise LookupError
        assert await live(generators) == 0
        statistics = pool.statistics()
        assert (statistics.made, statistics.cancelled, statistics.running, statistics.reading) == (3, 3, 0, 0)


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_place_is_held_while_the_generator_runs_whoever_reads(mesh):
    """Y14: one that has no more items has ended, though its consumer reads on."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool:
        async with pool.stream.tokens(3) as items:
            await until(lambda: pool.statistics().running == 0)
            assert pool.statistics().reading == 1
            assert is_balanced(pool.statistics())
            assert await pool.square(3) == 9
            assert pool.cancel_all(reason="none runs") == 0
            assert [number async for number, _ in items] == [0, 1, 2]
        with trimesh.configured(stream_window=4):
            async with pool.stream.tokens(1_000) as items:
                await anext(items)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pool.square, 3)
                    await until(lambda: pool.statistics().queued == 1)
                    assert pool.statistics().running == 1
                    assert (await generators.look.call_one())[1] <= 3 + 1 + 4 + 1  # the first stream, taken, ahead
                    assert is_balanced(pool.statistics())
                    nursery.cancel_scope.cancel()
        assert is_balanced(pool.statistics())


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_error_of_the_generator_comes_behind_its_items(mesh):
    """Y15."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool:
        found: list[Any] = []
        with pytest.raises(ValueError, match="3") as caught:
            async with pool.stream.broken(3) as items:
                async for item in items:
                    found.append(item)  # noqa: PERF401 - those before the error count
        assert trimesh.coords(caught.value) == [{"gpus": 0}]
        assert found == [None] * 3
        assert (pool.statistics().failed, pool.statistics().retried) == (1, 0)


@both
@simulate(seeds=10, per_host={"gpus": 2}, **HEALED)
async def test_death_before_the_first_item_goes_elsewhere_if_it_may_run_twice(mesh, faults):
    """Y15, Y1."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, route=lambda request, candidates: candidates[0]) as pool:
        outcomes: list[Any] = []

        async def repeat() -> None:
            async with pool.stream.again(3, 2.0) as items:
                outcomes.append(([number async for number in items], "end"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(repeat)
            nursery.start_soon(read, pool, outcomes, 3, 0.0, 1_000.0)
            await until(lambda: pool.statistics().running == 2)
            await trio.sleep(1)
            faults.kill(mesh.slice(gpus=0))
        assert sorted(outcomes) == [([], "ProcDied"), ([0, 1, 2], "end")]
        statistics = pool.statistics()
        assert (statistics.succeeded, statistics.failed, statistics.retried, statistics.running) == (1, 1, 1, 0)


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"gpus": 2}, supervision=Isolate())
async def test_death_after_an_item_is_raised_behind_what_has_come(mesh, faults):
    """Y15: never again elsewhere, where it would begin anew."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, route=lambda request, candidates: candidates[0]) as pool:
        found: list[int] = []
        with pytest.raises(ProcDied):
            async with pool.stream.tokens(1_000_000, 0.01) as items:
                async for number, rank in items:
                    assert rank == 0
                    found.append(number)
                    if number == 3:
                        faults.kill(mesh.slice(gpus=0))
        assert found == list(range(len(found)))
        assert len(found) >= 4
        async with pool.stream.tokens(1) as items:
            assert [item async for item in items] == [(0, 1)]
        statistics = pool.statistics()
        assert (statistics.succeeded, statistics.failed, statistics.retried) == (1, 1, 0)


@both
@simulate(seeds=5, per_host={"gpus": 1})
@pytest.mark.parametrize("how", ["abort", "group", "all", "close"])
async def test_pool_ends_streams_whose_consumers_do_not_read(mesh, how):
    """Y16, Y5: the generator unwinds, and its place is free, before the consumer learns of it."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[Any] = []
    go_on = trio.Event()

    async def consume() -> None:
        async with pool.options(group="red").stream.tokens(1_000_000) as items:
            await anext(items)
            entered.set()
            await go_on.wait()
            try:
                await anext(items)
            except (Paused, MeshStopped) as error:
                outcomes.append(type(error).__name__)
            except RemoteCancelled as error:
                outcomes.append(error.reason)

    entered = trio.Event()
    async with trio.open_nursery() as nursery:
        async with open_pool(generators, concurrency=1) as pool:
            nursery.start_soon(consume)
            await entered.wait()
            if how == "abort":
                async with pool.paused("abort"):
                    assert pool.statistics().running == 0
            elif how == "group":
                assert pool.cancel(group="red", reason="stale") == 1
            elif how == "all":
                assert pool.cancel_all(reason="over") == 1
            if how != "close":
                await until(lambda: pool.statistics().running == 0)
                assert pool.statistics().reading == 1
                assert await live(generators) == 0
                go_on.set()
                await until(lambda: bool(outcomes))
                assert (pool.statistics().cancelled, pool.statistics().reading) == (1, 0)
        assert await live(generators) == 0
        go_on.set()
    assert outcomes == [{"abort": "Paused", "group": "stale", "all": "over", "close": "MeshStopped"}[how]]


@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_pauses_rolls_and_resizes_wait_for_streams(mesh):
    """Y5, Y14."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[Any] = []
    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        for act in ("keep", "wait", "roll", "resize"):
            for _ in range(3):
                nursery.start_soon(read, pool, outcomes, 10, 0.02)
            await until(lambda: pool.statistics().running == 2 and pool.statistics().queued == 1)
            if act == "roll":
                async with pool.rolling() as replicas:
                    async for replica in replicas:
                        assert await live(replica) == 0
            elif act == "resize":
                await pool.resize(1)
                assert await live(generators.slice(gpus=1)) == 0
                await pool.resize(2)
            else:
                async with pool.paused(act):
                    assert pool.statistics().running == (2 if act == "keep" else 0)
                    assert pool.statistics().queued == 1
            await until(lambda: pool.statistics().running == pool.statistics().queued == 0)
    assert outcomes == [([*range(10)], "end")] * 12


@simulate(seeds=5, per_host={"gpus": 1})
async def test_queue_of_streams_is_bounded_and_ordered(mesh):
    """Y3: as that of calls; entering waits for the replica."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1, queue=2) as pool, trio.open_nursery() as nursery:
        order: list[int] = []

        async def consume(name: int, priority: int) -> None:
            async with pool.options(priority=priority).stream.tokens(1, 1.0) as items:
                order.append(name)
                async for _ in items:
                    pass

        for name, priority in enumerate([0, 0, 1, 0]):
            nursery.start_soon(consume, name, priority)
            await trio.testing.wait_all_tasks_blocked()
        statistics = pool.statistics()
        assert (statistics.running, statistics.queued, statistics.arriving) == (1, 2, 1)
        with pytest.raises(Overloaded, match="queue=2"):
            async with pool.options(when_full="refuse").stream.tokens(1):
                pass
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.5):
            async with pool.stream.tokens(1):
                pass
        await until(lambda: len(order) == 4)
        assert order == [0, 2, 1, 3]
        statistics = pool.statistics()
        assert (statistics.refused, statistics.cancelled) == (1, 1)


@both
@simulate(seeds=5, per_host={"replica": 2, "tp": 2})
async def test_items_of_the_first_member_of_a_replica(mesh):
    """Y14: those of the others are dropped, and never hold them up."""
    generators = await mesh.spawn("generators", Generator)
    with trimesh.configured(stream_window=2):
        async with open_pool(generators, along="replica") as pool:
            for _ in range(2):
                async with pool.stream.tokens(20) as items:
                    found = [item async for item in items]
                assert [number for number, _ in found] == list(range(20))
                assert {rank % 2 for _, rank in found} == {0}
            with pytest.raises(MeshErrorGroup) as caught:
                async with pool.stream.broken(3) as items:
                    async for _ in items:
                        pass
            assert caught.group_contains(ValueError)
            assert (pool.statistics().succeeded, pool.statistics().failed) == (2, 1)
        assert await live(generators) == 0


@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_wrong_kind_of_endpoint_is_refused_with_the_right_way(mesh):
    """Y14."""
    generators = await mesh.spawn("generators", Generator)
    consumer = (await mesh.spawn("consumers", Consumer)).slice(gpus=1)
    async with open_pool(generators) as pool:
        with pytest.raises(TypeError, match=r"write `async with pool\.stream\.tokens\(\.\.\.\) as items`"):
            await pool.tokens(3)
        with pytest.raises(TypeError, match=r"returns one value: write `await pool\.square\(\.\.\.\)`"):
            pool.stream.square(3)
        with pytest.raises(TypeError, match=r"write `await pool\.square\(\.\.\.\)`"):
            await consumer.fail.call_one(pool, "square", 3)
        with pytest.raises(AttributeError, match="no endpoint 'token'"):
            pool.stream.token(3)
        with pytest.raises(TypeError, match="missing a required argument"):
            async with pool.stream.tokens():
                pass
        with pytest.raises(RuntimeError, match="must be entered first"):
            await anext(pool.stream.tokens(3))
        assert is_balanced(pool.statistics())


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"gpus": 3}, supervision=Isolate())
async def test_streams_from_another_process(mesh, faults):
    """Y6, Y16: with the consumer's death its generator ends."""
    generators = await mesh.slice(gpus=slice(0, 2)).spawn("generators", Generator)
    consumer = (await mesh.spawn("consumers", Consumer)).slice(gpus=2)
    async with open_pool(generators, concurrency=1, queue=1) as pool:
        assert await consumer.read.call_one(pool, 100) == list(range(100))
        with pytest.raises(ValueError, match="3"):
            await consumer.fail.call_one(pool, "broken", 3)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(consumer.read_on.call_one, pool)
            await until(lambda: pool.statistics().running == 2)
            async with trio.open_nursery() as queued:
                queued.start_soon(pool.square, 2)
                await until(lambda: pool.statistics().queued == 1)
                with pytest.raises(Overloaded):
                    await consumer.fail.call_one(pool, "tokens", 3)
                queued.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
        assert await live(generators) == 0
        assert pool.statistics().running == 0

        async def read_on() -> None:
            with pytest.raises(ProcDied):
                await consumer.read_on.call_one(pool)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_on)
            await until(lambda: pool.statistics().running == 1)
            faults.kill(mesh.slice(gpus=2))
        await until(lambda: pool.statistics().running == 0)
        await none_lives(generators)
        assert is_balanced(pool.statistics())


@simulate(seeds=5, per_host={"gpus": 2})
async def test_route_that_raises_fails_its_own_request(mesh):
    """Y1: a call or a stream."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1, route=Affinity(lambda count: "abc"[count])) as pool:
        outcomes: list[str] = []

        async def consume(count: int) -> None:
            try:
                async with pool.stream.tokens(count) as items:
                    outcomes.append(str(len([item async for item in items])))
            except IndexError as error:
                outcomes.append(type(error).__name__)

        async with trio.open_nursery() as nursery:
            for count in (2, 1, 2, 7, 2, 1):
                nursery.start_soon(consume, count)
        assert sorted(outcomes) == ["1", "1", "2", "2", "2", "IndexError"]
        assert (pool.statistics().failed, pool.statistics().succeeded) == (1, 5)
