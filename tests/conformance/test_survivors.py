"""What survivors say of a death belongs to the death (X3)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import SimBackend, kinds, only_sim

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, ProcDied, Retry, current_rank, endpoint

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1000"


class Meeting(Actor):
    """Members that hear of a death by a connection of their own."""

    def __init__(self) -> None:
        self.lost = trio.Event()
        self.runs = 0

    @endpoint
    async def meet(self, error: Exception) -> None:
        if current_rank() == 0:
            with trio.CancelScope(shield=True):
                await self.lost.wait()
            raise error
        await trio.sleep_forever()

    @endpoint(idempotent=True)
    async def hear(self, error: Exception, times: int) -> int:
        """Raise that often; return how often it has run."""
        self.runs += 1
        if current_rank() == 0 and self.runs <= times:
            raise error
        return self.runs

    @endpoint(group="watch")
    async def lose(self) -> None:
        self.lost.set()


@only_sim
@pytest.mark.parametrize("error", [RuntimeError(GLOO), ConnectionResetError("reset"), EOFError("not said of a peer")])
@pytest.mark.parametrize("is_isolated", [False, True])
async def test_survivors_error_is_a_note_on_the_death(backend: SimBackend, error: Exception, *, is_isolated: bool):
    """X3: in the group of the block, and in that of a call; an error that says something else stays."""
    with pytest.raises(ExceptionGroup) as caught:
        async with backend.procs(supervision=Isolate() if is_isolated else None) as procs:
            meeting = await procs.spawn("meeting", Meeting)
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def _kill() -> None:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(1)
                        backend.kill(procs, 1)
                        await meeting.slice(gpus=0).lose.call_one()

                await meeting.meet.call(error)
    is_loss = not isinstance(error, EOFError)
    assert set(kinds(caught.value)) == ({ProcDied} if is_loss else {ProcDied, EOFError})
    notes = [note for leaf in trimesh.leaves(caught.value) for note in getattr(leaf, "__notes__", ())]
    assert any(f"{type(error).__name__}: {error}" in note for note in notes) is is_loss


@only_sim
async def test_loss_of_a_connection_without_a_death_is_a_failure(backend: SimBackend):
    """X3: nothing else tells of it."""
    async with backend.procs(supervision=Isolate()) as procs:
        meeting = await procs.spawn("meeting", Meeting)
        await meeting.lose.call()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            await meeting.slice(gpus=0).meet.call_one(RuntimeError(GLOO))


@only_sim
async def test_survivors_error_counts_as_a_death_for_retries(backend: SimBackend):
    """C6: within the number of attempts, if they are for deaths; an error that says something else does not."""
    async with backend.procs(supervision=Isolate()) as procs:
        meeting = await procs.spawn("meeting", Meeting)
        for_deaths = meeting.hear.options(retry=Retry(2, on=ProcDied, whole=False))
        assert (await for_deaths.call(RuntimeError(GLOO), 2)).values() == (3, 1)
        with pytest.raises(MeshErrorGroup) as caught:
            await for_deaths.call(RuntimeError(GLOO), 6)
        assert kinds(caught.value) == [RuntimeError]
        others = meeting.hear.options(retry=Retry(2, on=ConnectionError))
        for handle, error in ((for_deaths, RuntimeError("no")), (others, RuntimeError(GLOO))):
            with pytest.raises(MeshErrorGroup) as caught:
                await handle.call(error, 10)
            assert kinds(caught.value) == [RuntimeError]
        assert (await meeting.hear.call(RuntimeError(), 0)).values()[0] == 9
