"""Streams, maps and retries over members that die and come back (R07, R09; rules C6, C7, X3)."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import trio
from tests.conformance.mapping import Worker
from tests.conformance.meshes import Backend, attempt, kinds
from tests.conformance.probe import Probe
from tests.conformance.producing import Producer
from tests.conformance.supervised import reading

import trimesh
from trimesh import Actor, Died, Isolate, MeshErrorGroup, ProcDied, Restart, Retry, current_rank, endpoint


async def test_death_under_isolate_fails_the_stream_alone(backend: Backend):
    """R09, S05, E14: after the items that came before it; the others are cancelled and live on."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs:
        producers = await procs.spawn("producers", Producer)
        found: dict[int, list[int]] = defaultdict(list)
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.hold_after.stream(5) as results:
                await producers.wait.call("holding")
                backend.kill(procs, 1)
                async for point, number in results:
                    found[point.rank].append(number)
        assert kinds(caught.value) == [ProcDied]
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert found == {rank: list(range(5)) for rank in range(3)}
        alive = producers.exclude(trimesh.coords(caught.value))
        assert [log.count("unwound") for log in (await alive.seen.call()).values()] == [1, 1]


async def test_others_go_on_after_a_death(backend: Backend):
    """S06, R07: with `merge="collect"`."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup) as caught:
            async with producers.wait_for_gate.options(merge="collect").stream() as results:
                await producers.wait.call("gate")
                backend.kill(procs, 1)
                await log.wait(Died)
                await producers.alive().open_gate.call()
                assert sorted([point.rank async for point, _ in results]) == [0, 2]
        assert kinds(caught.value) == [ProcDied]


async def test_stream_of_a_restarted_member(backend: Backend):
    """R09: a stream that is opened while a member restarts waits for it."""
    async with backend.procs({"gpus": 2}, supervision=Restart()) as procs:
        producers = await procs.spawn("producers", Producer)
        with pytest.raises(MeshErrorGroup):
            async with producers.hold_after.stream(1) as results:
                await producers.wait.call("holding")
                backend.kill(procs, 0)
                async for _ in results:
                    pass
        async with producers.count.stream(100) as results:
            counted = Counter([point.rank async for point, _ in results])
        assert counted == {0: 100, 1: 100}


async def test_map_completes_when_members_die(backend: Backend):
    """C6, C7: each item has one result, whoever dies on the way."""
    async with backend.procs({"gpus": 3}, supervision=Restart(intensity=10)) as procs:
        solvers = await procs.spawn("solvers", Solver)
        handle = solvers.solve.options(retry=Retry(5), window=6)
        found = []
        async with handle.map(range(60)) as results:
            async for index, value in results:
                found.append((index, value))
                if len(found) % 15 == 10 and len(found) < 45:
                    backend.kill(procs, len(found) // 15)
        assert sorted(found) == [(index, index * index) for index in range(60)]


class Solver(Actor):
    @endpoint(idempotent=True)
    async def solve(self, item: int) -> int:
        await trio.sleep(0.01)
        return item * item

    @endpoint(idempotent=True, concurrency=10)
    async def meet(self, probe: Probe) -> int:
        """Say where it is and stay, in the first incarnation of rank 0."""
        if current_rank() == 0 and trimesh.context().incarnation == 0:
            await probe.note.call_one("met")
            await trio.sleep_forever()
        return current_rank()


async def test_call_is_tried_again_on_the_restarted_member(backend: Backend):
    """R09, C6: `call` and `call_one` wait for it, `choose` takes another one."""
    async with backend.procs({"gpus": 1}) as others, backend.procs({"gpus": 2}, supervision=Restart()) as procs:
        probe = await others.spawn("probe", Probe)
        solvers = await procs.spawn("solvers", Solver)
        handle = solvers.meet.options(retry=Retry(1))
        async with trio.open_nursery() as nursery:
            calls = [
                attempt(nursery, handle.call, probe),
                attempt(nursery, solvers.slice(gpus=0).meet.options(retry=Retry(1)).call_one, probe),
            ]
            await probe.wait.call_one("met", 2)
            backend.kill(procs, 0)
            assert list((await calls[0].result()).values()) == [0, 1]
            assert await calls[1].result() == 0


async def test_death_without_retry_fails_the_map_alone(backend: Backend):
    """R09, C7."""
    found = []
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs, reading(procs) as log:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(MeshErrorGroup) as caught:
            async with workers.hold.options(merge="collect").map(range(4)) as results:
                await workers.wait.call("holding", 2)
                backend.kill(procs, 1)
                await log.wait(Died)
                await workers.alive().open.call()
                async for index, _ in results:
                    found.append(index)
        assert len(found) == 2
        assert kinds(caught.value) == [ProcDied] * 2
        assert all(error.maybe_executed for error in caught.value.exceptions)
