"""Endpoints that answer after they have returned, by a `Reply` (rule A3)."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, only_real, only_sim
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import MeshError, MeshErrorGroup, Reply, endpoint, leaves


class Clerk(Tidy):
    """Keeps what it is to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Reply[Any]] = []

    @endpoint(reply="later")
    def ask(self, reply: Reply[str], name: str = "ask") -> None:
        self.notes.add(name)
        self.kept.append(reply)

    @endpoint(reply="later")
    async def ask_and_stay(self, reply: Reply[str], error: Exception | None = None) -> None:
        """Answer, then go on."""
        reply.send("answered")
        await self.gate.wait()
        if error is not None:
            raise error

    @endpoint(reply="later")
    async def forget(self, reply: Reply[int]) -> None:
        self.notes.add("forgotten")

    @endpoint(reply="later")
    async def refuse(self, reply: Reply[int], error: Exception) -> None:
        raise error

    @endpoint(reply="later", thread=True)
    def in_thread(self, reply: Reply[str], word: str) -> None:
        reply.send(word)

    @endpoint(reply="later")
    async def misuse(self, reply: Reply[Any]) -> None:
        with pytest.raises(TypeError):
            reply.send(threading.Lock())
        with pytest.raises(TypeError, match="Port"):
            pickle.dumps(reply)
        reply.send("right")
        with pytest.raises(RuntimeError, match="once"):
            reply.send("again")

    @endpoint
    async def answer(self, value: str) -> None:
        self.kept.pop(0).send(value)

    @endpoint
    async def answer_by_error(self, error: Exception) -> None:
        self.kept.pop(0).fail(error)

    @endpoint(concurrency=10, group="watch over")
    async def wait_over(self) -> bool:
        reply = self.kept[0]
        await reply.wait_over()
        return reply.is_over

    @endpoint
    async def seconds_left(self) -> float:
        return self.kept[0].seconds_left

    @endpoint
    async def drop(self) -> None:
        self.kept.clear()


async def test_calls_are_answered_later(backend: Backend):
    """A3, S08: the slot is free meanwhile, so another message may bring the answer; in any order."""
    async with backend.procs() as procs, trio.open_nursery() as nursery:
        clerks = await procs.spawn("clerks", Clerk)
        first = attempt(nursery, clerks.ask.call, "first")
        await clerks.wait.call("first")
        second = attempt(nursery, clerks.slice(gpus=1).ask.call_one, "second")
        await clerks.slice(gpus=1).wait.call_one("second")
        await clerks.answer.call("one")
        await first.over.wait()
        assert list(first.value.values()) == ["one", "one"]
        assert not second.over.is_set()
        await clerks.slice(gpus=1).answer_by_error.call_one(KeyError("two"))
        await second.over.wait()
        assert isinstance(second.error, KeyError)
        where = trimesh.origin(second.error)
        assert where is not None
        assert (where.mesh, where.endpoint, where.point) == ("clerks", "ask", {"gpus": 1})


async def test_endpoint_may_answer_and_go_on(backend: Backend):
    """A3: what it raises afterwards has no caller, and fails the block."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            clerk = await procs.spawn("clerk", Clerk)
            assert await clerk.ask_and_stay.call_one() == "answered"
            await clerk.open_gate.call_one()
            assert await clerk.misuse.call_one() == "right"
            assert await clerk.ask_and_stay.call_one(ValueError("after")) == "answered"
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["after"]


@only_real
async def test_call_is_answered_from_a_thread(backend: Backend):
    """A3: of the endpoint."""
    async with backend.procs({"gpus": 1}) as procs:
        clerk = await procs.spawn("clerk", Clerk)
        assert await clerk.in_thread.call_one("thread") == "thread"


async def test_reply_that_is_dropped_is_an_error(backend: Backend):
    """A3: when the endpoint has returned, or later; what the endpoint raises is told."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        clerk = await procs.spawn("clerk", Clerk)
        with pytest.raises(MeshError, match=r"forget was not answered.*dropped"):
            await clerk.forget.call_one()
        with pytest.raises(KeyError, match="raised"):
            await clerk.refuse.call_one(KeyError("raised"))
        asked = attempt(nursery, clerk.ask.call_one)
        await clerk.wait.call_one("ask")
        await clerk.drop.call_one()
        await asked.over.wait()
        assert isinstance(asked.error, MeshError)


async def test_broadcast_needs_no_reply(backend: Backend):
    """A3, E10: an answer, or none, is the same; an error fails the block."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            clerk = await procs.spawn("clerk", Clerk)
            await clerk.forget.broadcast()
            await clerk.ask.broadcast()
            await clerk.answer.call_one("unheard")
            await clerk.ask.broadcast()
            await clerk.answer_by_error.call_one(ValueError("heard"))
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["heard"]


async def test_failure_of_the_actor_ends_the_wait_for_its_reply(backend: Backend):
    """A3, E14: with the failure that has ended it."""
    async with backend.procs(supervision=trimesh.Isolate()) as procs:
        clerk = await procs.spawn("clerk", Clerk)
        asked = clerk.slice(gpus=0).ask.call_one.start()
        await clerk.slice(gpus=0).wait.call_one("ask")
        await clerk.slice(gpus=0).start_failing.call_one(LookupError("broken"))
        with pytest.raises(trimesh.ActorFailed, match="broken"):
            await asked


async def test_end_of_the_actor_ends_the_wait_for_its_reply(backend: Backend):
    """A3, M3: of a caller elsewhere, who is told that the actor has ended."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with procs.spawn("clerks", Clerk) as clerks:
            asked = probes.slice(gpus=0).relay.call_one.start(clerks.slice(gpus=1), "ask", "call_one")
            await clerks.slice(gpus=1).wait.call_one("ask")
        with pytest.raises(trimesh.RemoteCancelled):
            await asked


async def test_holder_of_a_reply_sees_the_cancel(backend: Backend):
    """A3, C01, E13: the caller leaves at once; a late answer is no error."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        clerk = await procs.spawn("clerk", Clerk)
        asked = attempt(nursery, clerk.ask.call_one)
        await clerk.wait.call_one("ask")
        watched = attempt(nursery, clerk.wait_over.call_one)
        asked.scope.cancel()
        await asked.over.wait()
        assert asked.cancelled
        await watched.over.wait()
        assert watched.value is True
        await clerk.answer.call_one("late")
        assert await clerk.rank.call_one() == 0


@only_sim
async def test_holder_of_a_reply_sees_the_deadline(backend: SimBackend):
    """A3, D06: how long its caller will wait."""
    async with backend.procs({"gpus": 1}) as procs:
        clerk = await procs.spawn("clerk", Clerk)
        began = trio.current_time()
        with trio.move_on_after(2.0) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(clerk.ask.call_one)
                await clerk.wait.call_one("ask")
                assert 1.0 < await clerk.seconds_left.call_one() <= 2.0
        assert scope.cancelled_caught
        assert trio.current_time() - began < 2.5
        assert await clerk.wait_over.call_one()


@only_real
async def test_death_of_the_process_ends_the_wait_for_a_reply(backend: Backend):
    """A3, E14: as that of any call."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            clerk = await procs.spawn("clerk", Clerk)
            asked = clerk.ask.call_one.start()
            await clerk.wait.call_one("ask")
            backend.kill(clerk, 0)
            await asked
    assert [type(leaf) for leaf in leaves(caught.value)] == [trimesh.ProcDied]
