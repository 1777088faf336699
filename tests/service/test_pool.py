"""Pools: each request has one outcome, whatever replicas, callers and pauses do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Backoff, Isolate, MeshStopped, Overloaded, ProcDied, RemoteCancelled, Restart, endpoint
from trimesh.service import Adaptive, Affinity, Health, Paused, RoundRobin, open_pool
from trimesh.testing import simulate

both = pytest.mark.mesh_backend("sim", "proc")
HEALED: dict[str, Any] = {"supervision": Restart("one_for_one", intensity=1000, period=60, backoff=Backoff(0.01))}


class Generator(Actor):
    def __init__(self) -> None:
        self.version = 0

    @endpoint(concurrency=8)
    async def generate(self, prompt: str, seconds: float = 0.0) -> tuple[str, int]:
        await trio.sleep(seconds)
        if prompt == "bad":
            raise ValueError(prompt)
        return prompt.upper(), trimesh.current_rank()

    @endpoint(concurrency=8, idempotent=True)
    async def again(self, prompt: str, seconds: float = 0.0) -> str:
        await trio.sleep(seconds)
        return prompt.upper()

    @endpoint
    def load(self, version: int) -> int:
        self.version = version
        return version

    @endpoint(group="health")
    async def ping(self) -> None:
        if self.version < 0:
            raise RuntimeError("not well")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    with trio.fail_after(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Caller(Actor):
    def __init__(self) -> None:
        self.over = trio.Event()

    @endpoint
    async def ask(self, pool: Any, prompt: str) -> Any:
        async with pool.session("of the caller") as session:
            found = await session.generate(prompt)
            return found, session.moved

    @endpoint
    async def settle(self, pool: Any, prompts: list[str]) -> dict[int, str]:
        async with pool.map_settled.generate(prompts) as results:
            return {index: type(one.error).__name__ if one.error else "" async for index, one in results}

    @endpoint
    async def pause(self, pool: Any) -> None:
        async with pool.paused("wait"):
            await self.over.wait()

    @endpoint(group="ends")
    def end_pause(self) -> None:
        self.over.set()

    @endpoint
    async def count(self, pool: Any) -> int:
        return pool.statistics().made


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_requests_go_to_all_replicas(mesh):
    """Y1."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool:
        async with pool.map.generate([f"p{n}" for n in range(9)]) as results:
            found = {index: value async for index, value in results}
        statistics = pool.statistics()

    assert [found[index][0] for index in range(9)] == [f"P{n}" for n in range(9)]
    assert {rank for _, rank in found.values()} == {0, 1, 2}
    assert (statistics.made, statistics.succeeded, statistics.running, statistics.queued) == (9, 9, 0, 0)


@both
@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_failure_in_a_settled_map_ends_its_item_alone(mesh, faults):
    """Y1."""
    generators = await mesh.spawn("generators", Generator)
    caller = await mesh.slice(gpus=0).spawn("caller", Caller)
    async with open_pool(generators, concurrency=2) as pool:
        async with pool.map_settled.generate(["a", "bad", "c", "bad"], window=2) as results:
            found = {index: outcome async for index, outcome in results}
        assert [found[index].ok for index in range(4)] == [True, False, True, False]
        assert found[0].unwrap()[0] == "A"
        with pytest.raises(ValueError, match="bad"):
            found[1].unwrap()
        assert (pool.statistics().succeeded, pool.statistics().failed) == (2, 2)
        assert await caller.settle.call_one(pool, ["x", "bad"]) == {0: "", 1: "ValueError"}
        faults.kill(mesh.slice(gpus=1))
        async with pool.map_settled[Generator.generate](["y"] * 8) as typed:
            outcomes = [outcome async for _, outcome in typed]
        assert len(outcomes) == 8
        assert {type(one.error) for one in outcomes} <= {type(None), ProcDied}

        def broken():
            yield "x"
            raise LookupError("no more items")

        with pytest.RaisesGroup(LookupError, flatten_subgroups=True):
            async with pool.map_settled.generate(broken()) as results:
                async for _ in results:
                    pass


class Serial(Actor):
    @endpoint
    async def generate(self, prompt: str) -> str:
        return prompt


class Batched(Actor):
    @endpoint(reply="later")
    async def generate(self, reply: trimesh.Reply[str], prompt: str) -> None:
        reply.send(prompt)


@simulate(seeds=1, per_host={"gpus": 1})
async def test_concurrency_that_no_endpoint_has_is_logged(mesh, caplog):
    """Y1: neither the default one nor one that some endpoint has, or needs none because it answers later."""
    serial = await mesh.spawn("serial", Serial)
    generators = await mesh.spawn("generators", Generator)
    batched = await mesh.spawn("batched", Batched)
    fitting = [(serial, {}), (serial, {"concurrency": 1}), (generators, {"concurrency": 4})]
    for mesh_of, options in [*fitting, (batched, {"concurrency": 4})]:
        async with open_pool(mesh_of, **options):
            pass
    assert not [one for one in caplog.records if "open_pool" in one.message]
    async with open_pool(serial, concurrency=4):
        pass
    [record] = [one for one in caplog.records if "open_pool" in one.message]
    assert "exceeds the concurrency of the endpoints of serial, 1" in record.message
    assert "@endpoint(concurrency=4)" in record.message


@simulate(seeds=1, per_host={"gpus": 1})
async def test_pool_without_a_queue_is_refused_with_the_reason(mesh):
    """Y1."""
    generators = await mesh.spawn("generators", Generator)
    with pytest.raises(ValueError, match=r'pass through it: .* queue=1 and options\(when_full="refuse"\)'):
        open_pool(generators, queue=0)


@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_error_of_the_endpoint_says_nothing_of_the_replica(mesh):
    """Y1: torchforge returns the exception and rebuilds the replica; here it is raised, and the replica serves on."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool:
        for _ in range(4):
            with pytest.raises(ValueError, match="bad"):
                await pool.generate("bad")
        statistics = pool.statistics()
    assert (statistics.failed, statistics.retried) == (4, 0)
    assert all(replica.is_up for replica in statistics.replicas)


@both
@simulate(seeds=10, per_host={"gpus": 2}, **HEALED)
async def test_request_of_a_dead_replica_is_made_again_only_if_it_may_run_twice(mesh, faults):
    """Y1, Y2: torchforge makes every request again after an error of the infrastructure: some run twice."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, route=lambda request, candidates: candidates[0]) as pool:
        outcomes: list[Any] = []

        async def ask(name: str) -> None:
            try:
                outcomes.append(await getattr(pool, name)("x", 5.0))
            except ProcDied as error:
                outcomes.append(error.maybe_executed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "again")
            nursery.start_soon(ask, "generate")
            await until(lambda: pool.statistics().running == 2)
            await trio.sleep(1)
            faults.kill(mesh.slice(gpus=0))
        assert sorted(map(str, outcomes)) == ["True", "X"]
        assert (await pool.generate("y"))[0] == "Y"
        await until(lambda: all(replica.is_up for replica in pool.statistics().replicas))
        assert await pool.generate("z") == ("Z", 0)


class Asking(Actor):
    @endpoint(concurrency=8, idempotent=True)
    async def ask(self, other: Any) -> Any:
        return await other.again.call_one("x", 1_000.0)


@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_death_of_another_mesh_is_an_outcome_of_the_endpoint(mesh, faults):
    """Y1, Y2: although it is one that a replica would die of, the request is not made again, and the replica serves."""
    asking = await mesh.spawn("asking", Asking)
    async with trimesh.this_host().spawn_procs({"gpus": 1}, supervision=Isolate(), setup=faults.armed()) as others:
        other = await others.spawn("other", Generator)
        async with open_pool(asking) as pool, trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(ProcDied):
                    await pool.ask(other)

            nursery.start_soon(ask)
            await until(lambda: pool.statistics().running == 1)
            await trio.sleep(1)
            faults.kill(others.slice(gpus=0))
        statistics = pool.statistics()
    assert (statistics.failed, statistics.retried) == (1, 0)
    assert all(replica.is_up for replica in statistics.replicas)


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_pool_goes_on_with_the_replicas_that_live(mesh, faults):
    """Y2."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool:
        faults.kill(mesh.slice(gpus=1))
        await until(lambda: len(generators.alive()) == 1)
        assert {(await pool.generate("a"))[1] for _ in range(6)} == {0}


@simulate(seeds=5, per_host={"gpus": 1})
async def test_full_queue_is_backpressure_or_a_refusal(mesh):
    """Y3: torchforge's queues have no bound."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1, queue=2) as pool, trio.open_nursery() as nursery:
        done: list[str] = []

        async def ask(prompt: str) -> None:
            done.append((await pool.generate(prompt, 1.0))[0])

        for number in range(5):
            nursery.start_soon(ask, f"p{number}")
            await trio.testing.wait_all_tasks_blocked()
        statistics = pool.statistics()
        assert (statistics.running, statistics.queued, statistics.arriving) == (1, 2, 2)
        with pytest.raises(Overloaded, match="queue=2"):
            await pool.options(when_full="refuse").generate("x")
        await trio.sleep(30)
        assert done == [f"P{number}" for number in range(5)]
        assert pool.statistics().refused == 1


@simulate(seeds=5, per_host={"gpus": 1})
async def test_priority_then_first_come(mesh):
    """Y3."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        done: list[str] = []

        async def ask(prompt: str, priority: int) -> None:
            done.append((await pool.options(priority=priority).generate(prompt, 1.0))[0])

        for prompt, priority in [("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", 1)]:
            nursery.start_soon(ask, prompt, priority)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(20)
        assert done == ["A", "C", "E", "B", "D"]


@simulate(seeds=5, per_host={"gpus": 1})
async def test_deadline_counts_in_the_queue(mesh):
    """Y3: The request leaves the queue with its caller, and never runs."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        nursery.start_soon(pool.generate, "first", 10.0)
        await trio.sleep(1)
        with pytest.raises(trio.TooSlowError), trio.fail_after(2):
            await pool.generate("second")
        statistics = pool.statistics()
        assert (statistics.queued, statistics.running, statistics.cancelled) == (0, 1, 1)


@simulate(seeds=10, per_host={"gpus": 2})
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_pause_around_a_weight_update(mesh, mode):
    """Y5."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[str] = []

    async def ask(prompt: str, seconds: float) -> None:
        try:
            outcomes.append((await pool.generate(prompt, seconds))[0])
        except Paused:
            outcomes.append("paused")

    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        for prompt in ("a", "b", "c"):
            nursery.start_soon(ask, prompt, 2.0)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        start = trio.current_time()
        async with pool.paused(mode):
            waited = trio.current_time() - start
            running = pool.statistics().running
            nursery.start_soon(ask, "new", 0.0)
            await trio.sleep(5)
            assert pool.statistics().queued == 2  # the third, and the new one
            inside = sorted(outcomes)
    assert inside == (["paused", "paused"] if mode == "abort" else ["A", "B"])
    assert running == (2 if mode == "keep" else 0)
    assert (waited > 0.5) == (mode == "wait")
    assert len(outcomes) == 4
    assert {"C", "NEW"} <= set(outcomes)


@simulate(seeds=5, per_host={"gpus": 2})
async def test_group_is_cancelled_running_and_queued(mesh):
    """Y5."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[str] = []

    async def ask(prompt: str, group: str) -> None:
        try:
            outcomes.append((await pool.options(group=group).generate(prompt, 3.0))[0])
        except RemoteCancelled as error:
            outcomes.append(error.reason)

    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, f"p{number}", "stale" if number % 2 else "fresh")
        await trio.sleep(1)
        assert pool.cancel(group="stale", reason="old weights") == 3
        await trio.sleep(20)
        assert sorted(outcomes) == ["P0", "P2", "P4", *["old weights"] * 3]
        assert pool.statistics().cancelled == 3


@both
@simulate(seeds=5, per_host={"gpus": 3}, supervision=Isolate())
async def test_session_stays_and_says_when_it_has_moved(mesh, faults):
    """Y4."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool, pool.session("chat") as chat:
        ranks = {(await chat.generate("x"))[1] for _ in range(5)}
        assert len(ranks) == 1
        assert not chat.moved
        [rank] = ranks
        faults.kill(mesh.slice(gpus=rank))
        await until(lambda: len(generators.alive()) == 2)
        assert (await chat.generate("x"))[1] != rank
        assert chat.moved


@simulate(seeds=5, per_host={"gpus": 4})
async def test_idle_replicas_share_new_sessions(mesh):
    """Y4: A fixed order among idle replicas would pin all sessions that begin then to one."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators) as pool:
        ranks = []
        for number in range(8):
            async with pool.session(f"s{number}") as chat:
                ranks.append((await chat.generate("x"))[1])
    assert sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]


@both
@simulate(seeds=5, per_host={"replica": 2, "tp": 2})
async def test_replica_is_a_whole_slice(mesh):
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, along="replica", route=RoundRobin()) as pool:
        assert [await pool.generate("a") for _ in range(4)] == [("A", 0), ("A", 2), ("A", 0), ("A", 2)]


@simulate(seeds=5, per_host={"gpus": 3})
async def test_rolling_update_takes_one_replica_out_at_a_time(mesh):
    """Y5."""
    generators = await mesh.spawn("generators", Generator)
    out: list[int] = []
    async with open_pool(generators, concurrency=2) as pool, trio.open_nursery() as nursery:

        async def load() -> None:
            while True:
                await pool.generate("x", 0.3)

        for _ in range(6):
            nursery.start_soon(load)
        await trio.sleep(1)
        async with pool.rolling(at_most=1) as replicas:
            async for replica in replicas:
                drained = [one for one in pool.statistics().replicas if one.is_drained]
                assert [one.running for one in drained] == [0]
                out.append(drained[0].index)
                await replica.load.call(7)
        assert not any(one.is_drained for one in pool.statistics().replicas)
        nursery.cancel_scope.cancel()
    assert out == [0, 1, 2]


@simulate(seeds=5, per_host={"gpus": 4})
async def test_resize_counts_during_a_rolling_update(mesh):
    """Y5: replicas that have left are not put back, nor handed out; those that have come have their turn."""
    generators = await mesh.spawn("generators", Generator)
    out: list[int] = []
    async with open_pool(generators, concurrency=2) as pool:
        await pool.resize(3)
        async with pool.rolling(at_most=2) as replicas:
            async for replica in replicas:
                out.append((await replica.generate.call_one("x"))[1])
                if len(out) == 1:
                    await pool.resize(2)
                elif len(out) == 2:
                    await pool.resize(4)
        assert [one.is_drained for one in pool.statistics().replicas] == [False] * 4
    assert out == [0, 1, 2, 3]


@simulate(seeds=5, per_host={"gpus": 3})
async def test_replica_that_leaves_during_its_update_has_no_turn(mesh):
    """Y5."""
    generators = await mesh.spawn("generators", Generator)
    out: list[int] = []
    async with open_pool(generators, concurrency=2) as pool, pool.rolling(at_most=2) as replicas:
        async for replica in replicas:
            out.append((await replica.generate.call_one("x"))[1])
            await pool.resize(1)
        assert [one.is_drained for one in pool.statistics().replicas] == [False, True, True]
    assert out == [0]


class Stuck(Generator):
    """Its first process on rank 0 answers no probe."""

    @endpoint(group="health")
    async def ping(self) -> None:
        if trimesh.current_rank() == 0 and trimesh.context(self).incarnation == 0:
            await trio.sleep_forever()

    @endpoint
    async def incarnation(self) -> int:
        return trimesh.context(self).incarnation


@both
@simulate(seeds=5, per_host={"gpus": 2}, **HEALED)
async def test_sick_replica_is_replaced_when_its_pool_kills_it(mesh):
    """Y2: and serves again."""
    stuck = await mesh.spawn("stuck", Stuck)
    async with open_pool(stuck, concurrency=1, health=Health(Stuck.ping, every=0.1, tries=2, then="replace")):
        incarnation = 0
        while incarnation == 0:
            with suppress(ProcDied):  # the call may be there when it is killed
                incarnation = await stuck.slice(gpus=0).incarnation.call_one()
                await trio.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"then": "kill"}, 'then must be "drain" or "replace", got \'kill\''),
        ({"every": 0}, "every > 0"),
    ],
)
def test_health_refuses_wrong_values(options: Any, text: str):
    with pytest.raises(ValueError, match=text):
        Health(Generator.ping, **options)


@simulate(seeds=1, per_host={"gpus": 2})
async def test_pool_kills_only_processes_of_its_own(mesh):
    generators = pickle.loads(pickle.dumps(await mesh.spawn("generators", Generator)))
    with pytest.raises(RuntimeError, match="belong to another process"):
        open_pool(generators, health=Health(Generator.ping, then="replace"))


@simulate(seeds=10, per_host={"gpus": 2})
async def test_route_that_raises_fails_its_own_request_alone(mesh):
    """Y1: whether the request waits, or finds a replica at once."""
    generators = await mesh.spawn("generators", Generator)
    found: list[str] = []

    async def ask(prompt: str) -> None:
        try:
            found.append((await pool.generate(prompt, 0.1))[0])
        except IndexError:
            found.append("refused")

    async with open_pool(generators, concurrency=1, route=Affinity(lambda prompt, _: prompt[0])) as pool:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, "" if number in (0, 7) else "x")
        counts = pool.statistics()
    assert sorted(found) == ["X"] * 10 + ["refused"] * 2
    assert (counts.succeeded, counts.failed, counts.cancelled, counts.running, counts.queued) == (10, 2, 0, 0, 0)


@simulate(seeds=5, per_host={"gpus": 3})
async def test_resize_drains_and_brings_back(mesh):
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=1) as pool:
        await pool.resize(1)
        assert {(await pool.generate("x"))[1] for _ in range(4)} == {0}
        await pool.resize(3)
        assert {(await pool.generate("x"))[1] for _ in range(6)} == {0, 1, 2}
        with pytest.raises(ValueError, match="1 to 3"):
            await pool.resize(4)


@simulate(seeds=5, per_host={"gpus": 2})
async def test_sick_replica_gets_no_requests_until_it_is_well(mesh):
    """Y2."""
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, health=Health(Generator.ping, every=1.0, tries=2)) as pool:
        await generators.slice(gpus=1).load.call_one(-1)
        await trio.sleep(5)
        assert {(await pool.generate("x"))[1] for _ in range(4)} == {0}
        await generators.slice(gpus=1).load.call_one(1)
        await trio.sleep(5)
        assert {(await pool.generate("x"))[1] for _ in range(4)} == {0, 1}


@pytest.mark.slow
@simulate(seeds=2, per_host={"gpus": 1})
async def test_adaptive_limit_comes_to_what_the_replica_can_do(mesh):
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, concurrency=Adaptive(1.0, most=8)) as pool, trio.open_nursery() as nursery:

        async def load() -> None:
            while True:
                await pool.generate("x", seconds)

        seconds = 0.1
        for _ in range(8):
            nursery.start_soon(load)
        await trio.sleep(30)
        assert pool.statistics().replicas[0].limit == 8
        seconds = 2.0
        await trio.sleep(60)
        assert pool.statistics().replicas[0].limit == 1
        nursery.cancel_scope.cancel()


@simulate(seeds=5, per_host={"gpus": 4})
async def test_equal_keys_go_to_one_replica_within_the_bound(mesh):
    generators = await mesh.spawn("generators", Generator)
    async with open_pool(generators, route=Affinity(lambda prompt: prompt[:3])) as pool:
        found: dict[str, set[int]] = {}
        for number in range(40):
            prompt = f"{number % 10:03}-{number}"
            found.setdefault(prompt[:3], set()).add((await pool.generate(prompt))[1])
        assert all(len(ranks) == 1 for ranks in found.values())
        assert len(set.union(*found.values())) > 1


@both
@simulate(seeds=5, per_host={"gpus": 2})
async def test_any_actor_may_hold_a_pool(mesh):
    """Y5, Y6."""
    generators = await mesh.slice(gpus=0).spawn("generators", Generator)
    caller = await mesh.slice(gpus=1).spawn("caller", Caller)
    async with open_pool(generators) as pool:
        assert await caller.ask.call_one(pool, "hi") == (("HI", 0), False)
        with pytest.raises(ValueError, match="bad"):
            await caller.ask.call_one(pool, "bad")
        with pytest.raises(RuntimeError, match="only be called in the process that opened"):
            await caller.count.call_one(pool)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.pause.call_one, pool)
            await until(lambda: pool.statistics().is_paused)
            await caller.end_pause.call_one()
        assert not pool.statistics().is_paused


@both
@simulate(seeds=10, per_host={"gpus": 2})
async def test_pool_that_ends_tells_who_holds_a_pause(mesh):
    """Y3, Y6: `MeshStopped` in the process that holds it, as its body ends."""
    generators = await mesh.slice(gpus=0).spawn("generators", Generator)
    caller = await mesh.slice(gpus=1).spawn("caller", Caller)
    async with trio.open_nursery() as nursery:

        async def hold(pool: Any) -> None:
            with pytest.raises(
                MeshStopped, match="the pool of generators accepts no requests: its block is being left"
            ):
                await caller.pause.call_one(pool)

        async with open_pool(generators) as pool:
            nursery.start_soon(hold, pool)
            await until(lambda: pool.statistics().is_paused)
        await caller.end_pause.call_one()


@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_pause_ends_with_its_holder(mesh, faults):
    """Y6."""
    generators = await mesh.slice(gpus=0).spawn("generators", Generator)
    caller = await mesh.slice(gpus=1).spawn("caller", Caller)
    async with open_pool(generators) as pool, trio.open_nursery() as nursery:

        async def hold() -> None:
            with pytest.raises(ProcDied):
                await caller.pause.call_one(pool)

        nursery.start_soon(hold)
        await trio.sleep(5)
        assert pool.statistics().is_paused
        faults.kill(mesh.slice(gpus=1))
        with trio.fail_after(60):
            assert await pool.generate("x") == ("X", 0)


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_leaving_the_block_ends_what_is_under_way(mesh):
    """Y3."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[str] = []

    async def ask(pool: Any) -> None:
        try:
            await pool.generate("x", 100.0)
        except MeshStopped:
            outcomes.append("stopped")

    async with trio.open_nursery() as nursery:
        async with open_pool(generators, concurrency=1) as pool:
            nursery.start_soon(ask, pool)
            nursery.start_soon(ask, pool)
            await trio.sleep(1)
        assert outcomes == ["stopped", "stopped"]
        with pytest.raises(MeshStopped):
            await pool.generate("late")
