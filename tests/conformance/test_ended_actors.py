"""What is left of actors that have ended, where they lived and where they were called from: nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend, member, only_sim
from tests.conformance.probe import Probe

from trimesh import Actor, MeshErrorGroup, MeshStopped, endpoint, this_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.peer import Outbox
from trimesh.errors import leaves
from trimesh.ids import AGENT, MeshId

MESHES = 5


class Caller(Actor):
    """Calls actors that it does not own."""

    def __init__(self) -> None:
        self.brief: Any = None

    @endpoint
    async def call(self, brief: Any, times: int) -> None:
        self.brief = brief
        for _ in range(times):
            await brief.rank.call()

    @endpoint
    async def post(self, brief: Any, times: int) -> None:
        for _ in range(times):
            await brief.note.broadcast("posted")

    @endpoint
    async def call_late(self) -> None:
        await self.brief.rank.call()

    @endpoint
    async def post_late(self, times: int) -> None:
        for _ in range(times):
            await self.brief.note.broadcast("late")


class Brief(Probe):
    """Lives for a few messages."""


def counted(procs: Sequence[Proc]) -> Iterator[tuple[str, object]]:
    """Yield whatever processes keep of each actor that they have sent messages to, or that others have."""
    for proc in procs:
        for peer in proc.peers():
            yield from (("outbox", mesh) for mesh, _ in peer.outboxes() if mesh != AGENT)
            yield from (("count", mesh) for mesh in peer.counts() if mesh != AGENT)


def outboxes(backend: SimBackend, mesh: Any) -> Iterator[tuple[MeshId, Outbox]]:
    """Yield the outboxes of the first process of a mesh."""
    for peer in backend.world.proc(member(mesh, 0).proc_id).peers():
        yield from peer.outboxes()


def living(backend: SimBackend) -> list[Proc]:
    """Return all processes of a family."""
    return [proc for _, proc in backend.world.living()]


async def settle() -> None:
    """Let everything arrive that is on its way."""
    await trio.testing.wait_all_tasks_blocked()


@only_sim
@pytest.mark.parametrize("verb", ["call", "post"])
async def test_nothing_is_kept_of_actors_that_have_ended(backend: SimBackend, verb: str):
    """By their owner, by others that have called them, by the processes that they lived in; after any number."""
    async with backend.procs() as procs, backend.procs() as others:
        callers = await others.spawn("callers", Caller)
        stays = await procs.spawn("stays", Brief)
        await callers.call.call(stays, 1)  # counted until the end of the test
        await settle()
        before = sorted(map(repr, counted(living(backend))))
        for _ in range(MESHES):
            async with procs.spawn("brief", Brief) as brief, this_proc().spawn("here", Brief) as here:
                for mesh in (brief, here):
                    await brief.rank.call()
                    await getattr(callers, verb).call(mesh, 3)
                assert len(list(counted(living(backend)))) > len(before)
            await settle()
            assert sorted(map(repr, counted(living(backend)))) == before


@only_sim
async def test_nothing_is_kept_of_messages_that_come_too_late(backend: SimBackend):
    """X3: whoever has a handle may send for ever; each message is refused, and counts nowhere."""
    async with backend.procs() as procs, backend.procs() as others:
        callers = await others.spawn("callers", Caller)
        async with procs.spawn("brief", Brief) as brief:
            await callers.call.call(brief, 1)
        await settle()
        left = list(counted(living(backend)))
        await callers.post_late.call(300)  # more than a mailbox takes
        with pytest.raises(MeshErrorGroup) as caught:
            await callers.call_late.call()
        assert all(isinstance(error, MeshStopped) for error in leaves(caught.value))
        await settle()
        assert list(counted(living(backend))) == left


@only_sim
async def test_messages_that_wait_for_an_actor_that_ends_are_refused(backend: SimBackend):
    """S07: whoever waits for room in the mailbox of an actor that has ended does not wait for ever."""
    async with backend.procs({}) as procs, backend.procs({}) as others:
        caller = await others.spawn("caller", Caller)
        async with trio.open_nursery() as nursery, procs.spawn("brief", Brief) as brief:
            await caller.call.call(brief, 1)
            backend.lag.links[member(others, 0).proc_id, member(procs, 0).proc_id] = (1.0, 1.0)
            nursery.start_soon(caller.post.call, brief, 300)
            await settle()
            box = dict(outboxes(backend, others))[brief._view.info.mesh]
            assert box.is_waiting
        await trio.sleep(5)
        assert brief._view.info.mesh not in dict(outboxes(backend, others))
