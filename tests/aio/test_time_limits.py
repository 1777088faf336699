"""`fail_after` and `move_on_after` of asyncio code: what they cut, and the budgets that travel (D, K04, K05)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from tests.aio.loops import Attempt
from tests.aio.test_deadlines import BUDGET_SECONDS, Clock
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS
from tests.rows import rows

import trimesh
from trimesh import MeshErrorGroup, endpoint, this_host
from trimesh.aio import TimeLimit, fail_after, move_on_after, time_limits

pytestmark = pytest.mark.real

SOON_SECONDS = 0.2
"""Of limits that are to end what waits for ever."""


def is_within(left: float, seconds: float = BUDGET_SECONDS) -> bool:
    """Tell whether a budget is that of a limit which was entered a moment ago."""
    return 0.5 * seconds < left <= seconds


def end_now(limit: TimeLimit) -> None:
    """Do what the timer of a limit does when it is over, at a moment that no busy machine can change."""
    assert limit.expire()


async def end_when(limit: TimeLimit, probe: Probe, note: str) -> None:
    """Let a limit be over as soon as a probe has noted something."""
    await probe.wait.call_one(note)
    end_now(limit)


async def all_cancelled(probe: Probe, *notes: str) -> bool:
    """Tell whether what has begun was cancelled; on a busy machine it may never have begun."""
    seen = await probe.seen.call_one()
    return all(seen.count(note) == seen.count(f"{note} cancelled") for note in notes)


def without_timer(limit: TimeLimit) -> None:
    """Let Trio be the first that ends a limit."""
    assert limit._timer is not None
    limit._timer.cancel()


class Times(trimesh.Actor):
    """Streams how much time it has."""

    @endpoint
    async def stream_left(self) -> AsyncGenerator[float, None]:
        while True:
            yield trio.current_effective_deadline() - trio.current_time()


class SlowStart(trimesh.Actor):
    """Is ready when someone cancels that."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        await trio.sleep_forever()
        yield


class Limiter(trimesh.aio.Actor):
    """Has limits of its own in its endpoints."""

    def __init__(self) -> None:
        self.caught: list[tuple[str, int]] = []

    @endpoint
    async def left(self, clock: Clock, seconds: float, *, start: bool = False) -> float:
        async with fail_after(seconds):
            if start:
                return await clock.left.call_one.start()
            return await clock.left.call_one()

    @endpoint
    async def cut(self, probe: Probe) -> tuple[str, int]:
        try:
            async with fail_after(SOON_SECONDS):
                await probe.hold.call_one()
        except TimeoutError as error:
            task = asyncio.current_task()
            assert task is not None
            await asyncio.sleep(0)
            return str(error), task.cancelling()
        return "not cut", -1

    @endpoint
    async def cut_by_caller(self, probe: Probe) -> None:
        try:
            async with fail_after(BUDGET_SECONDS):
                await probe.hold.call_one("by the caller")
        except asyncio.CancelledError:
            self.caught.append(("cancelled", 0))
            raise

    @endpoint
    async def seen(self) -> list[tuple[str, int]]:
        return self.caught


# ---- without meshes --------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_limit_cuts_what_the_body_awaits(run) -> None:
    """K04: as `asyncio.timeout`, without a mesh; the cancel is taken back."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeoutError, match=r"the time limit of 0.01 s is over"):
            async with fail_after(0.01) as failing:
                await asyncio.Event().wait()
        async with move_on_after(0) as limit:
            await asyncio.Queue[int]().get()
        assert failing.cancelled_caught
        assert limit.cancelled_caught
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        assert time_limits._limits == {}

    run(main)


def test_limit_that_does_not_cut_changes_nothing(run) -> None:
    """K04: a body that ends in time, raises, or has settled the cancel."""

    async def main() -> None:
        for seconds in (BUDGET_SECONDS, math.inf):
            async with fail_after(seconds) as limit:
                await asyncio.sleep(0)
            assert not limit.cancelled_caught
        with pytest.raises(LookupError, match="of the body"):
            async with move_on_after(0) as limit:
                try:
                    await asyncio.Event().wait()
                finally:
                    raise LookupError("of the body")
        assert not limit.cancelled_caught
        async with fail_after(0) as limit:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # it comes once
        assert not limit.cancelled_caught
        async with fail_after(0):
            pass  # it is over, and nothing was awaited

    run(main)


def test_earliest_of_nested_limits_holds(run) -> None:
    """D03, K04: and those of asyncio count."""

    async def main() -> None:
        async with move_on_after(BUDGET_SECONDS) as outer, move_on_after(0) as inner:
            await asyncio.Event().wait()
        assert (outer.cancelled_caught, inner.cancelled_caught) == (False, True)
        async with move_on_after(0) as outer, move_on_after(BUDGET_SECONDS) as inner:
            await asyncio.Event().wait()
        assert (outer.cancelled_caught, inner.cancelled_caught) == (True, False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), move_on_after(BUDGET_SECONDS) as inner:
                await asyncio.Event().wait()
        assert not inner.cancelled_caught
        async with asyncio.timeout(BUDGET_SECONDS), move_on_after(0) as inner:
            await asyncio.Event().wait()
        assert inner.cancelled_caught

    run(main)


def test_cancel_of_the_task_wins(run) -> None:
    """K04: one that comes with the deadline, and one that comes after it."""

    async def main() -> None:
        async def wait(inside: asyncio.Future[TimeLimit]) -> None:
            async with move_on_after(BUDGET_SECONDS) as limit:
                inside.set_result(limit)
                await asyncio.Event().wait()

        for is_first in (False, True):
            inside: asyncio.Future[TimeLimit] = asyncio.get_running_loop().create_future()
            attempt = Attempt(wait(inside))
            limit = await inside
            if is_first:
                attempt.task.cancel()
            end_now(limit)
            if not is_first:
                attempt.task.cancel()
            assert isinstance(await attempt.over(), asyncio.CancelledError)
            assert not limit.cancelled_caught
            assert attempt.task.cancelling() == 1

    run(main)


@rows("seconds", [-1.0, math.nan, -math.inf])
def test_limit_is_at_least_zero(seconds: float) -> None:
    for function in (fail_after, move_on_after):
        with pytest.raises(ValueError, match="must be a number of seconds >= 0"):
            function(seconds)


async def test_limit_is_for_asyncio() -> None:
    """In Trio the error says what to write."""
    with pytest.raises(RuntimeError, match=r"trio\.fail_after"):
        async with fail_after(1):
            pass


def test_limit_is_entered_once() -> None:
    async def main() -> None:
        async with fail_after(BUDGET_SECONDS) as limit:
            with pytest.raises(RuntimeError, match="entered once"):
                async with limit:
                    pass

    asyncio.run(main())


# ---- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_budget_of_a_limit_travels(run) -> None:
    """D02, D03, K04: to calls, started calls, nested calls, streams and blocks; the least of nested limits."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            clocks = await procs.spawn("clocks", Clock)
            one, other = clocks.slice(gpus=0), clocks.slice(gpus=1)
            async with fail_after(BUDGET_SECONDS):
                assert all(map(is_within, (await clocks.left.call()).values()))
                started = one.left.call_one.start()
                assert is_within(await one.left_within.call_one(other, 10 * BUDGET_SECONDS))
                async with fail_after(10 * BUDGET_SECONDS):
                    assert is_within(await one.left.call_one())
                async with fail_after(BUDGET_SECONDS / 10):
                    assert is_within(await one.left.call_one(), BUDGET_SECONDS / 10)
                    assert is_within(await one.left.call_one.start(), BUDGET_SECONDS / 10)
                assert is_within(await one.left.call_one())
                times = await procs.spawn("times", Times)
                async with times.slice(gpus=0).stream_left.stream() as items:
                    async for _, left in items:
                        assert is_within(left)
                        break
                async with this_host().spawn_procs({"gpus": 1}) as inner:
                    assert is_within(await (await inner.spawn("clock", Clock)).left.call_one())
            assert is_within(await started)
            assert await one.left.call_one() == math.inf
            assert await one.left.call_one.start() == math.inf

    run(main)


def test_limit_around_the_block_travels(run) -> None:
    """D02, K04: no block is open when it is entered."""

    async def main() -> None:
        async with (
            fail_after(BUDGET_SECONDS),
            trimesh.aio.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("clock", Clock) as clock,
        ):
            assert is_within(await clock.left.call_one())
            assert is_within(await clock.left.call_one.start())

    run(main)


def test_limit_holds_in_its_own_task(run) -> None:
    """K04: as for `asyncio.timeout`, a task that outlives the block, or is shielded from it, is not cut."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            clock = await procs.spawn("clock", Clock)
            probe = await procs.spawn("probe", Probe)
            async with fail_after(BUDGET_SECONDS):
                assert await asyncio.create_task(clock.left.call_one()) == math.inf

                async def within() -> float:
                    async with fail_after(BUDGET_SECONDS / 10):
                        return await clock.left.call_one()

                assert is_within(await asyncio.create_task(within()), BUDGET_SECONDS / 10)
            async with move_on_after(BUDGET_SECONDS) as limit:
                end = asyncio.create_task(end_when(limit, probe, "gathered"))
                gate = asyncio.create_task(probe.wait_for_gate.call_one())
                await asyncio.gather(asyncio.shield(gate), probe.hold_many.call_one("gathered"))
            assert limit.cancelled_caught
            await end
            await probe.wait.call_one("gathered cancelled")
            assert not gate.done()
            await probe.open_gate.call_one()
            assert await gate == "gate"

    run(main)


# ---- what is cut -----------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_call_that_is_cut_has_unwound(run) -> None:
    """C01, D01, D06, K04: whichever is first, the timer of the loop or the deadline in Trio."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            for note, end in (("both", None), ("timer", "timer"), ("Trio", "Trio")):
                with pytest.raises(TimeoutError):
                    async with fail_after(SOON_SECONDS if end != "timer" else BUDGET_SECONDS) as limit:
                        if end == "Trio":
                            without_timer(limit)
                        if end == "timer":
                            ending = asyncio.create_task(end_when(limit, probe, note))
                        await probe.hold.call_one(note)
                assert limit.cancelled_caught
                assert task.cancelling() == 0
                assert await all_cancelled(probe, note)
                await asyncio.sleep(0)
            await ending
            assert "timer cancelled" in await probe.seen.call_one()

    run(main)


def test_cancel_comes_once(run) -> None:
    """C09, K04: clean-up of the body is not cut by a second one, whichever is first."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            for is_in_trio in (False, True):
                with pytest.raises(TimeoutError):
                    async with fail_after(SOON_SECONDS) as limit:
                        if is_in_trio:
                            without_timer(limit)
                        async with trimesh.aio.open_trio(), procs.spawn("inner", Probe) as inner:
                            try:
                                await inner.hold.call_one()
                            finally:
                                await asyncio.sleep(2 * SOON_SECONDS)
                                assert task.cancelling() == 1
                assert task.cancelling() == 0
            assert await probe.rank.call_one() == 0

    run(main)


def test_expired_limit_starts_nothing(run) -> None:
    """D04, K04."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            async with move_on_after(0) as limit:
                await probe.note.call_one("never")
            assert limit.cancelled_caught
            with pytest.raises(TimeoutError):
                async with fail_after(0):
                    await probe.note.call_one.start("never")
            with pytest.raises(TimeoutError):
                async with fail_after(0), this_host().spawn_procs({"gpus": 1}):
                    pytest.fail("the block was entered")
            assert await probe.seen.call_one() == []

    run(main)


def test_started_call_is_cut_with_the_limit(run) -> None:
    """A1, D01, K04: where it is awaited it is a timeout; one that nobody waited for is cut, too."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            with pytest.raises(TimeoutError):
                async with fail_after(SOON_SECONDS):
                    await probe.hold_many.call_one.start("awaited")
            async with fail_after(SOON_SECONDS):
                later = probe.hold_many.call_one.start("later")
            with pytest.raises(trimesh.RemoteCancelled):
                await later
            assert await all_cancelled(probe, "awaited", "later")

    run(main)


def test_blocks_and_streams_are_cut(run) -> None:
    """C01, K04: while they are entered, while their body waits, while they are left."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            with pytest.raises(TimeoutError):
                async with fail_after(SOON_SECONDS), procs.spawn("slow", SlowStart):
                    pytest.fail("the block was entered")
            with pytest.raises(TimeoutError):
                async with fail_after(SOON_SECONDS) as limit:
                    without_timer(limit)
                    await procs.spawn("slow", SlowStart)
            with pytest.raises(TimeoutError):
                async with fail_after(SOON_SECONDS) as limit:
                    without_timer(limit)
                    async with procs.spawn("slow", SlowStart):
                        pytest.fail("the block was entered")
            async with move_on_after(SOON_SECONDS) as limit:  # noqa: SIM117 - the limit is around the whole block
                async with this_host().spawn_procs({"gpus": 1}):
                    await asyncio.Event().wait()
            assert limit.cancelled_caught
            with pytest.raises(TimeoutError):
                async with fail_after(BUDGET_SECONDS) as limit, procs.spawn("left", Probe) as left:
                    left.wait_for_gate.call_one.start()
                    await left.wait.call_one("gate")
                    asyncio.get_running_loop().call_later(SOON_SECONDS, end_now, limit)
            assert limit.cancelled_caught
            times = await procs.spawn("times", Times)
            with pytest.raises(TimeoutError):
                async with fail_after(SOON_SECONDS), times.stream_left.stream() as items:
                    async for _ in items:
                        await asyncio.sleep(0)
            assert await probe.rank.call_one() == 0

    run(main)


def test_block_outlives_the_limit_of_its_start(run) -> None:
    """D02, K04: a limit around entering only, by an exit stack, does not hold for the block."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            async with fail_after(HANG_SECONDS) as limit:
                procs = await stack.enter_async_context(trimesh.aio.spawn_procs({"gpus": 1}))
                clock = await stack.enter_async_context(procs.spawn("clock", Clock))
                async with move_on_after(SOON_SECONDS) as soon:
                    await stack.enter_async_context(trimesh.aio.open_trio())
            assert not soon.cancelled_caught
            await asyncio.sleep(2 * SOON_SECONDS)
            assert await clock.left.call_one() == math.inf
            assert await clock.left.call_one.start() == math.inf
            assert not limit.cancelled_caught

    run(main)


def test_errors_win_over_the_deadline(run) -> None:
    """E01, K04: of the endpoint that was cut, and of a mesh."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            with pytest.raises(MeshErrorGroup) as caught:
                async with move_on_after(BUDGET_SECONDS) as limit:
                    end = asyncio.create_task(end_when(limit, probe, "unwind"))
                    await probe.unwind.call(LookupError("in clean-up"))
            await end
            assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [LookupError]
            assert not limit.cancelled_caught
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    run(main)


def test_cancel_of_a_call_wins_over_its_limit(run) -> None:
    """C01, K04: a cancel that comes while the call unwinds after its deadline."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)

            limit = fail_after(BUDGET_SECONDS)

            async def call() -> None:
                async with limit:
                    await probe.fail_at_gate.call_one(LookupError("not raised"), ranks=[])

            attempt = Attempt(call())
            await end_when(limit, probe, "at the gate")
            await probe.note.call_one("there and back: the cancel has arrived before")
            attempt.task.cancel()
            await probe.open_gate.call_one()
            assert isinstance(await attempt.over(), asyncio.CancelledError)

    run(main)


# ---- endpoints of asyncio actors -------------------------------------------------------------------------------------


@pytest.mark.daily
async def test_limits_in_endpoints() -> None:
    """D03, D06, K05: the least of the limit and the caller's budget; the cancel of the caller wins."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        limiter = await procs.slice(gpus=0).spawn("limiter", Limiter)
        clock = await procs.slice(gpus=1).spawn("clock", Clock)
        probe = await procs.slice(gpus=1).spawn("probe", Probe)
        for start in (False, True):
            assert is_within(await limiter.left.call_one(clock, BUDGET_SECONDS, start=start))
            with trio.fail_after(BUDGET_SECONDS):
                assert is_within(await limiter.left.call_one(clock, 10 * BUDGET_SECONDS, start=start))
                assert is_within(await limiter.left.call_one(clock, BUDGET_SECONDS / 10, start=start), 100)
        assert await limiter.cut.call_one(probe) == (f"the time limit of {SOON_SECONDS:g} s is over", 0)
        seen = await probe.seen.call_one()
        assert seen.count("hold") == seen.count("hold cancelled")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(limiter.cut_by_caller.call_one, probe)
            await probe.wait.call_one("by the caller")
            nursery.cancel_scope.cancel()
        assert await limiter.seen.call_one() == [("cancelled", 0)]


def test_endpoint_with_a_limit_called_from_asyncio(run) -> None:
    """D03, K04, K05: the budget of a limit goes from asyncio to asyncio to Trio."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            limiter = await procs.slice(gpus=0).spawn("limiter", Limiter)
            clock = await procs.slice(gpus=1).spawn("clock", Clock)
            async with fail_after(BUDGET_SECONDS):
                assert is_within(await limiter.left.call_one(clock, 10 * BUDGET_SECONDS))

    run(main)
