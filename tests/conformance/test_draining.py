"""A block is left normally while a call that was given up still runs: how long that holds it up (rule M3)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import SimBackend, attempt, only_sim
from tests.conformance.probe import Notes, Probe

from trimesh import Actor, MeshErrorGroup, MeshStopped, ProcDied, endpoint, leaves, this_proc


class Hung(Actor):
    """Its endpoints share one slot, but for the one that looks."""

    def __init__(self) -> None:
        self.notes = Notes()

    @endpoint
    async def hang(self, seconds: float) -> None:
        """Hear no cancel for so long."""
        self.notes.add("hanging")
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    @endpoint
    async def tell(self, observer: Probe, note: str) -> str:
        await observer.note.call_one(note)
        return note

    @endpoint(concurrency=10)
    async def hanging(self) -> None:
        await self.notes.wait("hanging")


async def give_up(hung: Hung, seconds: float) -> None:
    """Call, and leave the endpoint alone with itself."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hung.hang.options(abandon_after=0).call_one, seconds)
            await hung.hanging.call_one()
            scope.cancel()


@only_sim
async def test_call_that_was_given_up_holds_the_block_up_for_its_grace(backend: SimBackend):
    """M3: its caller waits no more for it, so the block does not either; what is queued behind it never runs."""
    async with this_proc().spawn("observer", Probe) as observer, trio.open_nursery() as nursery:
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 1}, grace=3.0) as procs:
                hung = await procs.spawn("hung", Hung)
                await give_up(hung, 50.0)
                behind = attempt(nursery, hung.tell.call_one, observer, "behind")
                await trio.sleep(1.0)
                left_at = trio.current_time()
        (died,) = leaves(caught.value)
        assert isinstance(died, ProcDied)
        assert died.by == "grace"
        # It has had a second of its grace; what follows is the clean-up of all that the block owns.
        assert 5.0 <= trio.current_time() - left_at < 6.0
        with pytest.raises(MeshStopped, match="waits behind a cancelled call that has not ended"):
            await behind.result()
        assert await observer.seen.call_one() == []


@only_sim
async def test_call_that_was_given_up_long_ago_costs_one_grace(backend: SimBackend):
    """M3."""
    with pytest.raises(MeshErrorGroup):
        async with backend.procs({"gpus": 1}, grace=3.0) as procs:
            hung = await procs.spawn("hung", Hung)
            await give_up(hung, 50.0)
            await trio.sleep(10.0)
            left_at = trio.current_time()
    assert 3.0 <= trio.current_time() - left_at < 4.0


@only_sim
async def test_messages_behind_a_call_that_unwinds_in_time_run(backend: SimBackend):
    """M3: to give a call up takes nothing away from what was accepted, if it ends within its grace."""
    async with this_proc().spawn("observer", Probe) as observer:
        async with backend.procs({"gpus": 1}, grace=3.0) as procs:
            hung = await procs.spawn("hung", Hung)
            await give_up(hung, 2.0)
            await hung.tell.broadcast(observer, "behind")
            left_at = trio.current_time()
        assert 2.0 <= trio.current_time() - left_at < 3.0
        assert await observer.seen.call_one() == ["behind"]


@only_sim
async def test_call_that_somebody_waits_for_is_not_bounded(backend: SimBackend):
    """M3: accepted is accepted, however long it takes."""
    async with trio.open_nursery() as nursery:
        async with backend.procs({"gpus": 1}, grace=3.0) as procs:
            hung = await procs.spawn("hung", Hung)
            waited = attempt(nursery, hung.hang.call_one, 1000.0)
            await hung.hanging.call_one()
            left_at = trio.current_time()
        assert 999.0 <= trio.current_time() - left_at <= 1001.0
        await waited.result()
