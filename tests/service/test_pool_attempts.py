"""Retries, hedges and rates of pools."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
from tests.service.test_pool import HEALED, both, until

import trimesh
from trimesh import Actor, Backoff, Overloaded, RemoteCancelled, Retry, endpoint
from trimesh.service import Rate, open_pool
from trimesh.testing import simulate


class Flaky(Actor):
    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0

    @endpoint(concurrency=8, idempotent=True)
    async def fail(self, times: int, kind: str = "busy") -> int:
        """Fail so many times on this replica; then return the number of runs."""
        self.runs += 1
        if self.runs <= times:
            raise ConnectionError(kind) if kind == "busy" else ValueError(kind)
        return self.runs

    @endpoint(concurrency=8)
    async def fail_once(self) -> None:
        self.runs += 1
        raise ConnectionError("busy")

    @endpoint(concurrency=8, idempotent=True)
    async def slow_on(self, ranks: list[int], seconds: float) -> int:
        """Be slow on some ranks; return the rank."""
        self.runs += 1
        try:
            await trio.sleep(seconds if trimesh.current_rank() in ranks else 0.01)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        return trimesh.current_rank()

    @endpoint(concurrency=8)
    async def count(self, most: int) -> AsyncGenerator[int, None]:
        for number in range(most):
            yield number

    @endpoint(concurrency=8, group="watch")
    async def counts(self) -> tuple[int, int]:
        return self.runs, self.cancelled


class OnceOnly(Actor):
    @endpoint
    async def run(self) -> None: ...


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_request_is_made_again_after_an_error_that_the_retry_names(mesh):
    """Y19."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, retry=Retry(2, on=(ConnectionError,), backoff=Backoff(0.01))) as pool:
        assert await pool.fail(2) == 3
        assert (pool.statistics().retried, pool.statistics().succeeded) == (2, 1)
        with pytest.raises(ValueError, match="odd"):
            await pool.fail(9, "odd")
        with pytest.raises(ConnectionError) as caught:
            await pool.fail(99)
        assert "raised by attempt 3" in caught.value.__notes__[-1]
        with pytest.raises(ConnectionError):
            await pool.fail_once()
        found = pool.statistics()
        assert (found.retried, found.failed) == (4, 3)
        assert (found.running, found.arriving, found.queued) == (0, 0, 0)
        assert await flaky.slice(gpus=0).counts.call_one() == (8, 0)


@simulate(seeds=5, per_host={"gpus": 2})
async def test_retries_are_a_share_of_the_requests(mesh):
    """Y19: an outage does not multiply the load."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, retry=Retry(5, on=ConnectionError), budget=0.1) as pool:
        for _ in range(200):
            with pytest.raises(ConnectionError) as caught:
                await pool.fail(1_000_000)
        assert 20 <= pool.statistics().retried <= 30
        assert "the pool's budget, 0.1 of its requests, is used up" in caught.value.__notes__[-1]


@simulate(seeds=5, per_host={"gpus": 1})
async def test_request_that_waits_for_its_retry_has_no_place_and_can_be_cancelled(mesh):
    """Y19, Y5."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with (
        open_pool(flaky, concurrency=1, retry=Retry(3, on=ConnectionError, backoff=100.0)) as pool,
        trio.open_nursery() as nursery,
    ):
        outcomes: list[str] = []

        async def ask() -> None:
            try:
                await pool.options(group="red").fail(1)
            except RemoteCancelled as error:
                outcomes.append(error.reason)

        nursery.start_soon(ask)
        await trio.sleep(5)
        found = pool.statistics()
        assert (found.running, found.queued, found.arriving) == (0, 0, 1)
        assert await pool.slow_on([], 0) == 0
        assert pool.cancel(group="red", reason="old") == 1
        await trio.sleep(1)
        assert outcomes == ["old"]
        assert pool.statistics().arriving == 0


@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_slow_request_goes_to_a_second_replica_too(mesh):
    """Y20: the first answer counts, and the other run is cancelled."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, route=lambda request, candidates: candidates[0], hedge=0.2) as pool:
        with trio.fail_after(30):
            assert await pool.slow_on([0], 1_000.0) == 1
        found = pool.statistics()
        assert (found.hedged, found.made, found.succeeded, found.running) == (1, 1, 1, 0)

        async def cancelled() -> bool:
            return [*(await flaky.counts.call()).values()] == [(1, 1), (1, 0)]

        with trio.fail_after(30):
            while not await cancelled():  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert await pool.slow_on([], 0.0) == 0
        async with pool.session("chat") as chat:
            await chat.slow_on([0, 1], 1.0)
        assert pool.statistics().hedged == 1


@simulate(seeds=5, per_host={"gpus": 2})
async def test_hedge_after_the_95th_percentile(mesh):
    """Y20."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, hedge="p95") as pool:
        for _ in range(40):
            await pool.slow_on([], 0.0)
        assert pool.statistics().hedged <= 5
        start = trio.current_time()
        slow = [await pool.slow_on([0], 50.0) for _ in range(4)]
        assert set(slow) == {1}
        assert trio.current_time() - start < 2
        assert 1 <= pool.statistics().hedged <= 10


@simulate(seeds=5, per_host={"gpus": 2})
async def test_hedges_are_within_the_budget_and_need_room(mesh):
    """Y20."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, hedge=0.1, budget=0.1, concurrency=4) as pool:
        for _ in range(100):
            await pool.slow_on([0, 1], 0.5)
        assert 10 <= pool.statistics().hedged <= 20
    async with open_pool(flaky, hedge=0.1, concurrency=1) as pool, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(pool.slow_on, [0, 1], 1.0)
        await trio.sleep(0.5)
        assert (pool.statistics().hedged, pool.statistics().running) == (0, 2)


@both
@simulate(seeds=10, per_host={"gpus": 2}, **HEALED)
async def test_death_of_one_of_two_replicas_leaves_the_other(mesh, faults):
    """Y20, Y1."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, route=lambda request, candidates: candidates[0], hedge=0.1) as pool:
        found: list[int] = []

        async def ask() -> None:
            found.append(await pool.slow_on([0, 1], 2.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: pool.statistics().hedged == 1)
            faults.kill(mesh.slice(gpus=0))
        assert found == [1]
        assert (pool.statistics().succeeded, pool.statistics().retried) == (1, 0)
        assert [one.running for one in pool.statistics().replicas] == [0, 0]


@simulate(seeds=5, per_host={"gpus": 1})
async def test_requests_begin_at_the_rate(mesh):
    """Y21: in the order of their arrival; one that leaves holds none up."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, rate=Rate(2, burst=1)) as pool:
        begun: list[tuple[int, float]] = []
        start = trio.current_time()

        async def ask(number: int, limit: float = 1_000.0) -> None:
            with trio.move_on_after(limit):
                await pool.slow_on([], 0.0)
                begun.append((number, round(trio.current_time() - start, 1)))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(ask, number, 0.2 if number in (2, 3) else 1_000.0)
                await trio.sleep(0.001)
            await trio.sleep(0.01)
            assert pool.statistics().arriving == 5
            with pytest.raises(Overloaded, match="rate of 2 a second"):
                await pool.options(when_full="refuse").slow_on([], 0.0)
        assert [number for number, _ in begun] == [0, 1, 4, 5]
        assert [seconds for _, seconds in begun] == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=0.3)
        found = pool.statistics()
        assert (found.limited, found.refused, found.cancelled, found.arriving) == (5, 1, 2, 0)
        await trio.sleep(10)
        await pool.options(cost=3, when_full="refuse").slow_on([], 0.0)
        with pytest.raises(Overloaded):
            await pool.options(when_full="refuse").slow_on([], 0.0)


@both
@simulate(seeds=1, per_host={"gpus": 1})
async def test_policies_are_refused_with_the_reason(mesh):
    flaky, once = await mesh.spawn("flaky", Flaky), await mesh.spawn("once", OnceOnly)
    for options, error, text in [
        ({"retry": 3}, TypeError, "trimesh.Retry"),
        ({"rate": 100}, TypeError, r"write Rate\(100\)"),
        ({"hedge": "fast"}, ValueError, '"p95"'),
        ({"retry": Retry(1), "budget": 2}, ValueError, "from 0 to 1"),
    ]:
        with pytest.raises(error, match=text):
            open_pool(flaky, **options)
    for options in ({"retry": Retry(1)}, {"hedge": 1.0}):
        with pytest.raises(TypeError, match=r"once has none: mark those that may with @endpoint\(idempotent=True\)"):
            open_pool(once, **options)


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_streams_enter_at_the_rate(mesh):
    """Y21, Y14: in one line with requests; a stream that waits can be cancelled."""
    flaky = await mesh.spawn("flaky", Flaky)
    async with open_pool(flaky, rate=Rate(20, burst=1)) as pool:
        begun: list[tuple[int, float]] = []
        start = trio.current_time()

        async def read(number: int) -> None:
            cost = 1.0 if number else 40.0  # the next one begins two seconds later
            async with pool.options(group=number, cost=cost).stream.count(3) as items:
                begun.append((number, trio.current_time() - start))
                assert [item async for item in items] == [0, 1, 2]

        async def ask(number: int) -> None:
            if number == 2:
                with pytest.raises(RemoteCancelled):
                    await read(number)
            elif number % 2:
                await pool.slow_on([], 0.0)
                begun.append((number, trio.current_time() - start))
            else:
                await read(number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
                await until(lambda number=number: pool.statistics().made == number + 1)
            assert pool.cancel(group=2) == 1
            with pytest.raises(Overloaded, match="rate of 20 a second"):
                async with pool.options(when_full="refuse").stream.count(1):
                    raise AssertionError
        assert {number for number, _ in begun} == {0, 1, 3, 4}  # in the order of their replies, which jitter changes
        assert all(seconds >= 2 + place / 20 - 0.001 for place, (_, seconds) in enumerate(begun[1:], start=-1))
        found = pool.statistics()
        assert (found.refused, found.cancelled, found.succeeded, found.arriving) == (1, 1, 4, 0)
