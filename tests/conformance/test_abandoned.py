"""Calls that are given up before their end is known: how long their callers wait, and what is remembered (rule C2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meeting import come, make_meetings, meet
from tests.conformance.meshes import RealBackend, SimBackend, member, only_real, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import reading
from tests.conformance.test_stalls import listening

import trimesh
from trimesh import Died, Isolate, Unacknowledged, endpoint, limits
from trimesh._runtime.life.current import current_proc


async def streamed(mesh: Any, seconds: float) -> None:
    async with mesh.unwind.options(abandon_after=seconds).stream(None, 60.0) as results:
        async for _ in results:
            pass


async def mapped(mesh: Any, seconds: float) -> None:
    async with mesh.unwind_for.options(abandon_after=seconds).map([60.0, 60.0]) as results:
        async for _ in results:
            pass


VERBS: dict[str, Callable[[Any, float], Awaitable[Any]]] = {
    "call": lambda mesh, seconds: mesh.unwind.options(abandon_after=seconds).call(None, 60.0),
    "call_settled": lambda mesh, seconds: mesh.unwind.options(abandon_after=seconds).call_settled(None, 60.0),
    "call_one": lambda mesh, seconds: mesh.slice(gpus=0).unwind.options(abandon_after=seconds).call_one(None, 60.0),
    "choose": lambda mesh, seconds: mesh.unwind.options(abandon_after=seconds).choose(None, 60.0),
    "stream": streamed,
    "map": mapped,
}


class Slow(Probe):
    @endpoint(concurrency=100)
    async def unwind_for(self, seconds: float) -> None:
        await Probe.unwind(self, None, seconds)

    @endpoint
    async def rank_for(self, item: int) -> int:
        return trimesh.current_rank()


@only_sim
@pytest.mark.parametrize("seconds", [0, 0.5, 8.0])
@pytest.mark.parametrize("verb", VERBS)
async def test_caller_waits_as_long_as_it_says(backend: SimBackend, verb: str, seconds: float):
    """C2: `abandon_after` bounds the wait after a cancel or a deadline, for every verb."""
    async with backend.procs(grace=100) as procs:  # the endpoints unwind for a minute
        slow = await procs.spawn("slow", Slow)
        start = trio.current_time()
        with trio.move_on_after(1) as scope:
            await VERBS[verb](slow, seconds)
        assert scope.cancelled_caught
        assert trio.current_time() - start == 1 + seconds


@only_sim
async def test_abandoned_call_is_said_once_when_it_is_silent(backend: SimBackend):
    """C2: at WARNING with endpoint, point and ages, and as an event; what answers in time is not worth a word."""
    async with listening() as said, backend.procs() as procs, procs.events() as events:
        slow = await procs.spawn("slow", Slow)
        dropped = current_proc().dropped_replies
        hasty = slow.unwind.options(abandon_after=0)
        start = trio.current_time()
        for seconds in (0.5, 60.0):
            with trio.move_on_after(1):
                await hasty.call(None, seconds)
        assert trio.current_time() - start == 2
        assert slow.statistics().calls_unended == 2
        assert not said.texts

        await said.wait(2)
        assert trio.current_time() - start == 2 + limits.CANCEL_ACK_SECONDS
        assert [at - start for at, _ in said.texts] == [2 + limits.CANCEL_ACK_SECONDS] * 2
        texts = sorted(text for _, text in said.texts)
        for rank, text in enumerate(texts):
            assert text.startswith(
                "slow.unwind was abandoned: it has not acknowledged its cancel for 5.0 s, is 6.0 s old"
            )
            assert f"at slow[gpus={rank}]" in text
        assert {event.point["gpus"] async for event in _first(events, Unacknowledged, 2)} == {0, 1}

        await slow.wait.call("unwind over", 2)
        assert slow.statistics().calls_unended == 0
        assert current_proc().dropped_replies == dropped + 4
        assert len(said.texts) == 2


async def _first(events: Any, kind: type[Any], count: int) -> Any:
    while count:
        event = await anext(events)
        if isinstance(event, kind):
            count -= 1
            yield event


@only_sim
async def test_abandoned_call_weighs_for_choose_until_its_end(backend: SimBackend):
    """C2: `choose` and `map` prefer others to a member that may still be busy with what was given up."""
    async with backend.procs() as procs:
        slow = await procs.spawn("slow", Slow)
        with trio.move_on_after(1):
            await slow.slice(gpus=0).unwind.options(abandon_after=0).call_one(None, 60.0)
        assert [await slow.rank.choose() for _ in range(4)] == [1, 1, 1, 1]
        async with slow.rank_for.map(range(4), window=1) as results:
            assert [value async for _, value in results] == [1, 1, 1, 1]
        await slow.slice(gpus=0).wait.call_one("unwind over")
        assert sorted([await slow.rank.choose() for _ in range(4)]) == [0, 0, 1, 1]


@only_sim
async def test_death_ends_what_was_abandoned(backend: SimBackend):
    """C2: nothing of it is left when the process is gone."""
    async with backend.procs(supervision=Isolate(), grace=100) as procs, reading(procs) as log:
        slow = await procs.spawn("slow", Slow)
        with trio.move_on_after(1):
            await slow.unwind.options(abandon_after=0).call(None, 60.0)
        peer = current_proc().peer(member(slow, 0).proc_id)
        assert len(list(peer.abandoned)) == 1
        backend.kill(slow, 0)
        await log.wait(Died)
        assert not list(peer.abandoned)
        assert [member.calls_unended for member in slow.statistics().members] == [0, 1]


@only_sim
async def test_stalled_members_come_last(backend: SimBackend):
    """C2: a member whose loop is known not to run is chosen only when no other lives."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        transport = backend.world.proc(member(probes, 1).proc_id).transport
        transport.lag(60.0)
        await trio.sleep(limits.STALL_SECONDS + 1)
        async with trio.open_nursery() as nursery:
            for rank in (0, 2):
                for _ in range(3):
                    nursery.start_soon(probes.slice(gpus=rank).hold_many.call_one)
            assert [await probes.rank.choose() for _ in range(4)] == [0, 2, 0, 2]
            nursery.cancel_scope.cancel()

        start = trio.current_time()
        with trio.move_on_after(1):
            await probes.slice(gpus=1).rank.call_one()
        assert trio.current_time() - start == 1 + limits.STALLED_ACK_SECONDS
        transport.stop_lagging()
        await probes.slice(gpus=1).rank.call_one()
        assert sorted([await probes.rank.choose() for _ in range(3)]) == [0, 1, 2]


class Stuck(Probe):
    @endpoint(group="stuck")
    def compute(self, started: str, released: str) -> None:
        """Keep the main thread, which hears nothing meanwhile."""
        come(started)
        come(released)


@only_real
async def test_deadline_bounds_the_caller_of_a_process_that_hears_nothing(backend: RealBackend, tmp_path: Path):
    """C2: not after the bound of acknowledgements, but as soon as it says."""
    started, released = make_meetings(tmp_path, "started", "released")
    async with backend.procs() as procs:
        stuck = await procs.spawn("stuck", Stuck)
        one = stuck.slice(gpus=1)
        await one.compute.broadcast(started, released)
        await meet(started)
        with trio.move_on_after(0.1) as scope:
            await one.rank.options(abandon_after=0).call_one()
        assert scope.cancelled_caught
        assert [member.calls_unended for member in stuck.statistics().members] == [0, 1]
        assert [await stuck.rank.choose() for _ in range(3)] == [0, 0, 0]
        await meet(released)
        assert await one.rank.call_one() == 1
        assert stuck.statistics().calls_unended == 0
