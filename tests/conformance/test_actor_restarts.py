"""Actors that are made anew in their process (rules P1, P3; R01-R05, R10, R11)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, fill, kinds
from tests.conformance.probe import Probe, Tidy
from tests.conformance.supervised import reading, remake, restart
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    ActorFailed,
    Died,
    Failed,
    FailFast,
    GaveUp,
    Isolate,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restarted,
    Restarting,
    RestartLimit,
    endpoint,
    this_proc,
)
from trimesh._runtime.life.current import current_proc


class Numbered(Tidy):
    """Knows its incarnation; its background task fails on request."""

    @endpoint(concurrency=10, group="watch2")
    async def incarnation(self) -> int:
        return trimesh.context().incarnation

    @endpoint
    async def fail_when(self, keeper: Any) -> None:
        await keeper.wait_for_gate.call_one()
        raise KeyError("the gate is open")


@pytest.mark.daily("real")
async def test_failed_actor_is_made_anew_in_its_process(backend: Backend):
    """P1: a new incarnation, the same process; other actors there, and other ranks, go on (R07)."""
    async with backend.procs() as procs:
        actors = await procs.supervised(remake()).spawn("actors", Numbered)
        pids = [*(await actors.pid.call()).values()]
        await actors.note.call("state")
        async with reading(actors) as log:
            await actors.slice(gpus=1).start_failing.call_one(KeyError("background"))
            await log.wait(Restarted)
            assert [*(await actors.incarnation.call()).values()] == [0, 1]
            assert [*(await actors.pid.call()).values()] == pids
            assert [*(await actors.seen.call()).values()] == [["state"], []]
            died = log.of(Died)[0]
            assert [type(leaf) for leaf in trimesh.leaves(died.error)] == [KeyError]
            assert log.names()[2:] == ["Died 1.0", "Restarting 1.0", "Restarted 1.1"]


async def test_message_to_an_actor_that_is_made_anew_waits(backend: Backend):
    """API 6: from its owner and from elsewhere; what was running there fails with the cause (R09)."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs({"gpus": 1}, name="others") as others,
        backend.procs() as procs,
        trio.open_nursery() as nursery,
    ):
        relay = await others.spawn("relay", Probe)
        actors = await procs.supervised(remake()).spawn("actors", Gated, keeper)
        target = actors.slice(gpus=0)
        async with reading(actors) as log:
            running = attempt(nursery, target.hold_many.call_one)
            await target.wait.call_one("hold")
            await target.start_failing.call_one(KeyError("background"))
            await keeper.wait.call_one("starting again")
            waiting = attempt(nursery, target.rank.call_one)
            away = attempt(nursery, relay.relay.call_one, target, "rank", "call_one")
            impatient = attempt(nursery, relay.relay.call_one, target, "note", "call_one", "never")
            await relay.wait.call_one("relay note")
            impatient.cancel()
            await impatient.over.wait()
            await keeper.open_gate.call_one()
            assert await waiting.result() == 0
            assert await away.result() == 0
            with pytest.raises(ActorFailed):
                await running.result()
            assert "never" not in await target.seen.call_one()
            assert len(log.of(Restarted)) == 1


class Gated(Numbered):
    """Starts again only when the keeper lets it."""

    def __init__(self, keeper: Probe) -> None:
        super().__init__()
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.context().incarnation:
            await self.keeper.note.call_one("starting again")
            await self.keeper.wait_for_gate.call_one()
        async with trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()


async def test_one_for_all_remakes_the_living_too(backend: Backend):
    """R02, P3: their calls raise `MeshStopped`, and their clean-up runs."""
    async with backend.procs() as procs, trio.open_nursery() as nursery:
        actors = await procs.supervised(remake(strategy="one_for_all")).spawn("actors", Numbered)
        async with reading(actors) as log:
            held = attempt(nursery, actors.slice(gpus=0).hold_many.call_one)
            await actors.slice(gpus=0).wait.call_one("hold")
            await actors.slice(gpus=1).start_failing.call_one(KeyError("background"))
            await log.wait(Restarted, 2)
            with pytest.raises(MeshStopped):
                await held.result()
            assert [*(await actors.incarnation.call()).values()] == [1, 1]
            assert log.ranks(Died) == [1]


async def test_failed_broadcast_counts_for_a_policy_that_names_it(backend: Backend):
    """P3."""
    async with backend.procs() as procs:
        actors = await procs.supervised(remake()).spawn("actors", Numbered)
        async with reading(actors) as log:
            await actors.fail.broadcast(KeyError("lost"), [0])
            await log.wait(Restarted)
            assert log.ranks(Failed) == [0]
            assert [*(await actors.incarnation.call()).values()] == [1, 0]


async def test_broadcasts_that_a_restart_cuts_short_make_room(backend: Backend):
    """S03: they are not answered, so what is left of a full mailbox is credited by frames of its own."""
    async with this_proc().spawn("keeper", Probe) as keeper, backend.procs({"gpus": 1}) as procs:
        actors = await procs.supervised(remake()).spawn("actors", Numbered)
        async with reading(actors) as log:
            await actors.fail_when.broadcast(keeper)
            await keeper.wait.call_one("gate")
            fill(actors.fail_when, keeper)
            await keeper.open_gate.call_one()
            await log.wait(Restarted)
            with trio.fail_after(HANG_SECONDS):
                assert await actors.incarnation.call_one() == 1


@pytest.mark.parametrize("policy", [FailFast(), Isolate()])
async def test_past_its_limit_it_escalates(backend: Backend, policy: Any):
    """P1: to the policy of the processes."""
    with pytest.raises(MeshErrorGroup) if isinstance(policy, FailFast) else _nothing() as caught:
        async with backend.procs(supervision=policy) as procs:
            actors = await procs.supervised(remake(intensity=1)).spawn("actors", Numbered)
            async with reading(actors) as log:
                await actors.slice(gpus=1).start_failing.call_one(KeyError(1))
                await log.wait(Restarted)
                await actors.slice(gpus=1).start_failing.call_one(KeyError(2))
                gave_up = await log.wait(GaveUp)
                assert isinstance(gave_up.error, RestartLimit)
                assert len(gave_up.error.causes) == 2
                if isinstance(policy, FailFast):
                    await trio.sleep_forever()
                assert await actors.slice(gpus=0).rank.call_one() == 0
                with pytest.raises((ActorFailed, MeshStopped)):
                    await actors.slice(gpus=1).rank.call_one()
                assert len(actors.alive()) == 1
    if isinstance(policy, FailFast):
        assert kinds(caught.value) == [RestartLimit]


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


async def test_past_its_limit_its_process_is_restarted(backend: Backend):
    """P1: under `Restart`, and then the actor's own policy begins anew."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as proc_log:
        actors = await procs.supervised(remake(intensity=0)).spawn("actors", Numbered)
        target = actors.slice(gpus=1)
        before = await target.pid.call_one()
        await target.start_failing.call_one(KeyError(1))
        restarted = await proc_log.wait(Restarted)
        assert restarted.incarnation == 1
        assert isinstance(proc_log.of(Restarting)[0].cause, RestartLimit)
        assert await target.incarnation.call_one() == 1
        if not backend.is_sim:
            assert await target.pid.call_one() != before


class Hasty(Numbered):
    """Fails as soon as it serves, the second time that it is made."""

    def __init__(self, keeper: Any) -> None:
        super().__init__()
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        await self.keeper.note.call_one("made")
        is_second = len(await self.keeper.seen.call_one()) == 2
        await trio.sleep(0.1)
        async with super().lifespan():
            if is_second:
                self.nursery.start_soon(self.fail_at_once)
            yield

    async def fail_at_once(self) -> None:
        raise KeyError("at once")


def stall(backend: Backend, seconds: float) -> None:
    """Read no news in this process for a while, so that all of them come at once."""
    if backend.is_sim:
        current_proc().transport.lag(seconds)
    else:
        time.sleep(seconds)


async def test_process_heals_an_actor_that_is_given_up_as_soon_as_it_starts(backend: Backend):
    """P1: that it has been made in the old process, which is learnt with its failure, is out of date."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs({"gpus": 1}, supervision=restart()) as procs,
        reading(procs) as log,
    ):
        actor = await procs.supervised(remake(intensity=1)).spawn("actor", Hasty, keeper)
        await actor.start_failing.call_one(KeyError("background"))
        await keeper.wait.call_one("made", 2)
        await trio.sleep(0.05)
        stall(backend, 0.3)
        await log.wait(Restarted)
        assert len(actor.alive()) == 1
        assert await actor.rank.call_one() == 0


async def test_failure_that_is_learnt_with_the_start_after_that_of_the_process_counts(backend: Backend):
    """P1: the actor was made anew with its process, and its own policy heals what happens from then on."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs({"gpus": 1}, supervision=restart()) as procs,
    ):
        actor = await procs.supervised(remake()).spawn("actor", Hasty, keeper)
        async with reading(actor) as log:
            backend.kill(procs, 0)
            await keeper.wait.call_one("made", 2)
            await trio.sleep(0.05)
            stall(backend, 0.3)
            with trio.fail_after(HANG_SECONDS):
                await log.wait(Restarted, 2)
            assert await actor.incarnation.call_one() == 2


class Starting(Numbered):
    """Its process is taken down while it starts on one rank."""

    def __init__(self, keeper: Any) -> None:
        super().__init__()
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() == 1:
            await self.keeper.note.call_one("starting")
            await trio.sleep_forever()
        async with super().lifespan():
            yield


async def test_actor_that_starts_while_its_process_is_taken_down(backend: Backend):
    """E11: the spawn fails by the death that began it, not by how the other rank is stopped."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs(supervision=restart("one_for_all")) as procs,
        trio.open_nursery() as nursery,
    ):
        for count in range(1, 4):
            spawning = attempt(nursery, procs.spawn, f"actors{count}", Starting, keeper)
            await keeper.wait.call_one("starting", count)
            backend.kill(procs, 0)
            with pytest.raises(MeshErrorGroup) as caught:
                await spawning.result()
            assert kinds(caught.value) == [ProcDied]


async def test_actor_that_does_not_start_again_counts(backend: Backend, tmp_path: Any):
    """R05."""
    flag = tmp_path / "broken"
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            actors = await procs.supervised(remake(intensity=2)).spawn("actors", Fragile, str(flag))
            flag.touch()
            await actors.slice(gpus=0).start_failing.call_one(KeyError("background"))
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, RestartLimit)
    assert [type(cause) for cause in leaf.causes[1:]] == [ValueError, ValueError]


class Fragile(Numbered):
    def __init__(self, path: str) -> None:
        super().__init__()
        with open(path, "a") as file:
            file.write("once more\n")
        if trimesh.context().incarnation:
            raise ValueError("still broken")


@pytest.mark.parametrize(("when", "restarts"), [("permanent", True), ("transient", False), ("temporary", False)])
async def test_actor_that_ends_by_itself(backend: Backend, when: str, restarts: bool):
    """R10, R11: it is no failure; only a permanent one comes back."""
    async with backend.procs() as procs:
        actors = await procs.supervised(remake(when=when)).spawn("actors", Numbered)
        async with reading(actors) as log:
            with pytest.raises((trimesh.RemoteCancelled, MeshStopped)):
                await actors.slice(gpus=1).cancel_itself.call_one()
            died = await log.wait(Died)
            assert died.error is None
            if restarts:
                await log.wait(Restarted)
                assert [*(await actors.incarnation.call()).values()] == [0, 1]
            else:
                with pytest.raises(MeshStopped):
                    await actors.slice(gpus=1).rank.call_one()
                assert [*(await actors.alive().rank.call()).values()] == [0]
                assert log.of(Restarting) == []


async def test_actor_that_ends_by_itself_is_no_failure(backend: Backend):
    """R11: under `FailFast`, too."""
    async with backend.procs() as procs:
        actors = await procs.spawn("actors", Numbered)
        async with reading(actors) as log:
            with pytest.raises((trimesh.RemoteCancelled, MeshStopped)):
                await actors.slice(gpus=1).cancel_itself.call_one()
            await log.wait(Died)
        assert await actors.slice(gpus=0).rank.call_one() == 0


async def test_actor_of_this_process_is_made_anew(backend: Backend):
    async with (
        backend.procs(),
        this_proc().supervised(remake()).spawn("actor", Numbered) as actor,
        reading(actor) as log,
    ):
        await actor.start_failing.call_one(KeyError("background"))
        await log.wait(Restarted)
        assert await actor.incarnation.call_one() == 1


async def test_block_ends_while_an_actor_restarts(backend: Backend):
    """M3: what waits for it gets `MeshStopped`."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs() as procs,
        trio.open_nursery() as nursery,
    ):
        async with procs.supervised(remake()).spawn("actors", Gated, keeper) as actors:
            await actors.slice(gpus=0).start_failing.call_one(KeyError("background"))
            await keeper.wait.call_one("starting again")
            waiting = attempt(nursery, actors.slice(gpus=0).rank.call_one)
        with pytest.raises((MeshStopped, ActorFailed)):
            await waiting.result()
