"""Pools, slots and replay buffers without `await`, over real processes."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh.blocking as tb
from trimesh import (
    Actor,
    Backoff,
    Isolate,
    Overloaded,
    RemoteCancelled,
    Retry,
    configured,
    current_rank,
    endpoint,
)
from trimesh.blocking.service import Pool, PoolSession, ReplayBuffer, Slots, face, open_pool, open_replay, open_slots
from trimesh.service import Health, Paused, PoolStatistics, Rate, Requests

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Answerer(Actor):
    def __init__(self) -> None:
        self.here = 0

    @endpoint(concurrency=8)
    async def answer(self, prompt: str) -> str:
        if not prompt:
            raise ValueError("no prompt")
        return prompt.upper()

    @endpoint(concurrency=8)
    async def spell(self, prompt: str) -> AsyncGenerator[str, None]:
        for letter in prompt:
            yield letter

    @endpoint(concurrency=8)
    async def hang(self, gate: Any) -> None:
        await gate.wait.call_one()

    @endpoint(concurrency=8, idempotent=True)
    async def fail(self, times: int) -> int:
        """Fail so many times in all; return the number of runs."""
        self.here += 1
        if self.here <= times:
            raise ConnectionError("busy")
        return self.here

    @endpoint(concurrency=8, idempotent=True)
    async def hold_on(self, ranks: list[int], gate: Any) -> int:
        """Wait on some ranks; return the rank."""
        if current_rank() in ranks:
            await gate.wait.call_one()
        return current_rank()

    @endpoint(group="health")
    def ping(self) -> None: ...

    @endpoint(concurrency=8, thread=True)
    def ask(self, pool: Any, slots: Any, buffer: Any) -> str:
        """Use handles in a thread of an actor."""
        with face(slots).lease() as lease:
            with face(pool).stream.spell("asked") as letters:
                text: str = face(pool).answer("".join(letters))
            face(buffer).add(text, version=lease.version)
        return text


class Gate(Actor):
    """Lets those go that wait."""

    def __init__(self) -> None:
        self.event = trio.Event()

    @endpoint(concurrency=8, group="waits")
    async def wait(self) -> None:
        await self.event.wait()

    @endpoint
    def open(self) -> None:
        self.event.set()


@pytest.fixture(scope="module")
def procs() -> Iterator[tb.ProcMesh]:
    # Its history would begin in the midst of a test, which would seem to have left it behind.
    with configured(history=0), tb.spawn_procs({"gpus": 2}) as procs:
        yield procs


async def faced(handle: Any) -> Any:
    """Return the blocking form of a handle, which arrives as that of `trimesh.service`."""
    await trio.lowlevel.checkpoint()
    return face(handle)


def until(pool: Pool[Any], *, running: int, queued: int = 0) -> None:
    wait_for(pool, lambda found: (found.running, found.queued) == (running, queued))


def wait_for(pool: Pool[Any], condition: Callable[[PoolStatistics], bool]) -> None:
    """Wait for what no event tells."""
    for _ in range(int(HANG_SECONDS / 0.01)):
        if condition(pool.statistics()):
            return
        threading.Event().wait(0.01)
    raise AssertionError(pool.statistics())


def test_requests_sessions_maps_and_rolls(procs: tb.ProcMesh) -> None:
    """Y1, Y4, Y5, K06: what an endpoint raises is raised; each replica is handed out once."""
    answerers = procs.spawn("answerers", Answerer)
    with open_pool(answerers, health=Health(Answerer.ping)) as pool:
        assert pool.answer("a") == "A"
        assert pool[Answerer.answer]("b") == "B"
        assert [one.result(HANG_SECONDS) for one in [pool.answer.submit(text) for text in "xyz"]] == ["X", "Y", "Z"]
        with pytest.raises(ValueError, match="no prompt"):
            pool.answer("")
        with pytest.raises(AttributeError, match="answer"):
            pool.nothing("a")
        with pool.session("s") as session:
            assert session.answer("s") == "S"
            assert session.moved is False
            again = tb.run(faced, session)
            assert (type(again), again.moved) == (PoolSession, False)
        with pool.map.answer(["x", "y"]) as results:
            assert dict(results) == {0: "X", 1: "Y"}
        with pool.map[Answerer.answer](["x"], window=1) as typed:
            assert dict(typed) == {0: "X"}
        with pool.map_settled.answer(["x", ""]) as outcomes:
            assert {index: outcome.ok for index, outcome in outcomes} == {0: True, 1: False}
        with pool.map_settled[Answerer.answer](["x"]) as typed_outcomes:
            assert [outcome.unwrap() for _, outcome in typed_outcomes] == ["X"]
        with pool.rolling() as replicas:
            assert [replica.answer.call_one("r") for replica in replicas] == ["R", "R"]
        updated: list[Any] = []
        pool.each(lambda replica: updated.append(replica.answer.call_one("u")))
        pool.each(lambda replica: updated.append(replica.answer.call_one("v")), at_most=2)
        assert updated == ["U", "U", "V", "V"]
        with pytest.raises(LookupError):
            pool.each(lambda replica: {}[replica])
        with pytest.raises(TypeError, match="each takes a function of the mesh of a replica, got 3"):
            pool.each(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        pool.resize(1)
        assert [one.is_drained for one in pool.statistics().replicas] == [False, True]
        found = pool.statistics()
        assert (found.made, found.succeeded, found.failed) == (13, 11, 2)
    with pytest.raises(TimeoutError), tb.fail_after(0.0), open_pool(answerers):
        pass


def test_streams(procs: tb.ProcMesh) -> None:
    """Y14, Y16, K06: an iterator in a block, which ends the generator."""
    answerers = procs.spawn("spellers", Answerer)
    with open_pool(answerers) as pool:
        for stream in (pool.stream.spell, pool.stream[Answerer.spell], pool.spell.stream):
            with stream("abc") as letters:
                assert list(letters) == ["a", "b", "c"]
        with pool.session("s") as session, session.stream.spell("a" * 1_000) as letters:
            assert next(letters) == "a"
        with pytest.raises(TypeError, match="which only stream can call"):
            pool.spell("a")
        with pytest.raises(TypeError, match="returns one value"):
            pool.stream.answer("a")
        found = pool.statistics()
        assert (found.made, found.succeeded, found.cancelled, found.running) == (4, 3, 1, 0)


def test_retries_hedges_and_rates(procs: tb.ProcMesh) -> None:
    """Y19, Y20, Y21, K06: for threads; a time limit ends each wait."""
    gate = procs.slice(gpus=0).spawn("lock", Gate)
    answerers = procs.spawn("triers", Answerer)
    retry = Retry(2, on=(ConnectionError,), backoff=Backoff(0.001))
    with open_pool(answerers.slice(gpus=0), retry=retry) as pool:
        assert pool.fail(2) == 3
        with pool.map.fail([4] * 2) as results:
            assert sorted(value for _, value in results) == [5, 6]
        with pytest.raises(ConnectionError) as caught:
            pool.fail(99)
        assert "raised by attempt 3" in caught.value.__notes__[-1]
    slow = Retry(1, on=ConnectionError, backoff=1_000.0)
    with open_pool(answerers, route=first_candidate, retry=slow, hedge=0.01) as pool:
        assert pool.hold_on([0], gate) == 1
        with pool.paused("wait"):
            assert [one.running for one in pool.statistics().replicas] == [0, 0]
        for ask in (lambda: pool.hold_on([0, 1], gate), lambda: pool.fail(99)):
            with pytest.raises(TimeoutError), tb.fail_after(0.1):
                ask()
        found = pool.statistics()
        assert (found.hedged >= 1, found.cancelled, found.running, found.arriving) == (True, 2, 0, 0)
    with open_pool(answerers, rate=Rate(20, burst=1)) as pool:
        assert pool.options(cost=40).answer("x") == "X"  # the next one begins two seconds later
        waiting = [pool.answer.submit("a"), pool.answer.submit("b")]
        assert waiting[0].cancel()
        assert waiting[1].result(HANG_SECONDS) == "B"
        with pool.options(cost=10_000).stream.spell("ab") as letters:
            with pytest.raises(Overloaded, match="rate of 20 a second"):
                pool.options(when_full="refuse").answer("a")
            with pytest.raises(Overloaded), pool.options(when_full="refuse").stream.spell("c"):
                pass
            assert list(letters) == ["a", "b"]
        with pytest.raises(TimeoutError), tb.fail_after(0.0), pool.stream.spell("d"):
            pass
        assert (pool.statistics().refused, pool.statistics().arriving) == (2, 0)


def test_replica_that_is_taken_away_lets_its_streams_end() -> None:
    """Y14, Y18, K06: a thread reads on while others leave, or the load asks for fewer replicas."""
    with configured(history=0), tb.spawn_procs({"replica": 2}, supervision=Isolate()) as procs:
        answerers = procs.spawn("leavers", Answerer)
        with open_pool(answerers, along="replica", procs=procs) as pool, ThreadPoolExecutor(1) as threads:
            with pool.stream.spell("a" * 1_000) as first, pool.stream.spell("b" * 1_000) as second:
                assert [next(first), next(second)] == ["a", "b"]
                shrinking = threads.submit(pool.resize, 1)
                wait_for(pool, lambda found: found.replicas[1].is_drained)
                assert list(second) == ["b"] * 999
                shrinking.result(HANG_SECONDS)
                assert list(first) == ["a"] * 999
            with pool.autoscale(1, 2, by=Requests(1.5), every=0.01, grow_after=0.02, shrink_after=0.05):
                with pool.stream.spell("a" * 1_000), pool.stream.spell("b" * 1_000):
                    wait_for(pool, lambda found: found.replicas[1].is_up)
                    leaving = threads.submit(read_on, pool)
                    wait_for(pool, lambda found: found.replicas[1].running == 1)
                assert leaving.result(HANG_SECONDS) == ["c"] * 1_000
                wait_for(pool, lambda found: not found.replicas[1].is_up)
            found = pool.statistics()
            assert (found.succeeded, found.cancelled, found.failed) == (3, 2, 0)


def first_candidate(request: Any, candidates: Any) -> Any:
    return candidates[0]


def read_on(pool: Pool[Any]) -> list[str]:
    """Read a stream to its end once its replica is to leave."""
    with pool.stream.spell("c" * 1_000) as letters:
        found = [next(letters)]
        wait_for(pool, lambda found: found.replicas[1].is_drained)
        return [*found, *letters]


def test_pauses_groups_and_full_queues(procs: tb.ProcMesh) -> None:
    """Y3, Y5, K06."""
    gate = procs.slice(gpus=0).spawn("gate", Gate)
    answerers = procs.slice(gpus=1).spawn("hangers", Answerer)
    with open_pool(answerers, concurrency=1, queue=1) as pool:
        first = pool.options(group="red").hang.submit(gate)
        until(pool, running=1)
        second = pool.options(group="blue", priority=1, cost=2.0).answer.submit("later")
        until(pool, running=1, queued=1)
        with pytest.raises(Overloaded):
            pool.options(when_full="refuse").answer("refused")
        assert pool.cancel(group="red") == 1
        with pytest.raises(RemoteCancelled):
            first.result(HANG_SECONDS)
        assert second.result(HANG_SECONDS) == "LATER"
        third = pool.hang.submit(gate)
        until(pool, running=1)
        with pool.paused("abort"):
            with pytest.raises(Paused):
                third.result(HANG_SECONDS)
            fourth = pool.answer.submit("after")
            until(pool, running=0, queued=1)
            with pytest.raises(TimeoutError), tb.fail_after(0.05):
                pool.answer("in a pause")
            assert (pool.statistics().running, fourth.done()) == (0, False)
        assert fourth.result(HANG_SECONDS) == "AFTER"
        fifth = pool.hang.submit(gate)
        until(pool, running=1)
        with pool.paused("keep"):
            assert pool.statistics().running == 1
            gate.open.call_one()
        with pool.paused("wait"):
            assert fifth.done()
        assert pool.cancel_all(reason="none is there") == 0


def test_slots_and_buffers_and_handles_in_threads_of_actors(procs: tb.ProcMesh) -> None:
    """Y6, Y7, Y8, Y9, K06."""
    answerers = procs.spawn("askers", Answerer)
    with (
        open_pool(answerers, concurrency=4) as pool,
        open_slots(batch=2, staleness=0) as slots,
        open_replay(capacity=10, slots=slots) as buffer,
    ):
        assert answerers.slice(gpus=0).ask.call_one(pool, slots, buffer) == "ASKED"
        with slots.lease() as lease:
            buffer.add("own", version=lease.version, group="g", priority=2.0)
        assert sorted(buffer.sample(2)) == ["ASKED", "own"]
        assert buffer.sample(1, by="group") in (["ASKED"], ["own"])
        with pytest.raises(TimeoutError), tb.fail_after(0.05), slots.lease():
            pass
        with pytest.raises(LookupError), buffer.taking(2):
            raise LookupError("not trained")
        with buffer.taking(1) as batch:
            assert batch == ["ASKED"]
        saved = slots.state_dict(), buffer.state_dict()
        assert buffer.take(1) == ["own"]
        slots.advance(version=1)
        assert slots.statistics().in_use == 0
        with slots.lease():
            pass
        buffer.add("old", version=1)
        assert buffer.clear(reason="over") == 1
        assert buffer.statistics().evicted == {"over": 1}
    with procs.spawning("none", Answerer), open_slots(batch=2, staleness=0) as slots, open_replay(capacity=9) as buffer:
        slots.load_state_dict(saved[0])
        buffer.load_state_dict(saved[1])
        buffer.advance(version=3)
        assert (buffer.take(1), buffer.statistics().version) == (["own"], 3)
        slots.release(0)


def test_face_takes_handles_of_services_only() -> None:
    with pytest.raises(TypeError, match=r"trimesh\.blocking\.face"):
        face(1)  # type: ignore[call-overload]
    assert {Pool.__name__, Slots.__name__, ReplayBuffer.__name__} == {"Pool", "Slots", "ReplayBuffer"}
