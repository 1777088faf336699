"""`procs.resize` and `procs.membership()`: rules P6 and P7."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, only_sim
from tests.conformance.probe import Tidy
from tests.conformance.supervised import Fragile, Ledger, kill_and_see, kill_and_wait, reading, remake, restart
from tests.conformance.test_actor_restarts import Numbered
from tests.conformance.test_isolation import Held
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    ActorFailed,
    FailFast,
    Isolate,
    MembershipChanged,
    MembershipView,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restarted,
    ShapeError,
    Started,
    endpoint,
    this_proc,
)

SHAPE = {"replica": 2, "gpus": 2}


def places(view: MembershipView) -> tuple[list[int], list[int], list[tuple[int, int, type]]]:
    """What a view says, by ranks: who serves, who has joined, who has left."""
    left = [(one.point.rank, one.incarnation, type(one.reason)) for one in view.left]
    return [point.rank for point in view.members], [point.rank for point in view.joined], left


class Ranked(Ledger):
    """Tells its place, and how it was made."""

    @endpoint
    async def place(self) -> tuple[int, int, Any]:
        return trimesh.current_rank(), trimesh.context().incarnation, self.made_from


async def test_mesh_grows_with_its_actors(backend: Backend):
    """P6: ranks stay, actors are made as the first ones were; those of a part along other dimensions, too."""
    async with backend.procs(SHAPE, supervision=Isolate()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ranked, "made", by="hand")
        leads = await procs.slice(gpus=0).spawn("leads", Ranked)
        alone = await procs.slice(replica=1).spawn("alone", Ranked)
        await ledgers.bump.call()
        grown = await procs.resize(replica=3)
        assert dict(grown.extent) == {"replica": 3, "gpus": 2}
        assert dict(procs.extent) == SHAPE
        now = await trimesh.current_view(ledgers)
        assert [*(await now.bump.call()).values()] == [2, 2, 2, 2, 1, 1]
        made = (("made",), {"by": "hand"})
        assert [*(await now.place.call()).values()] == [(rank, 0, made) for rank in range(6)]
        assert len(await ledgers.bump.call()) == 4
        first = await trimesh.current_view(leads)
        assert [(dict(point), rank) for point, (rank, *_) in (await first.place.call()).items()] == [
            ({"replica": rank}, rank) for rank in range(3)
        ]
        assert len(await trimesh.current_view(alone)) == 2
        others = await grown.spawn("others", Ranked)
        assert len(await others.place.call()) == 6
        assert [event.point.rank for event in log.of(Started)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.daily("real")
async def test_mesh_shrinks_and_its_calls_say_so(backend: Backend):
    """P6, C11: what runs there is cancelled, what comes later is not sent; the others go on."""
    async with backend.procs({"replica": 3}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        ledgers = await procs.spawn("ledgers", Ledger)
        leaver, stayer = ledgers.slice(replica=2), ledgers.slice(replica=0)
        held = attempt(nursery, leaver.hold_many.call_one)
        queued = [attempt(nursery, leaver.hold.call_one) for _ in range(2)]
        kept = attempt(nursery, stayer.wait_for_gate.call_one)
        await leaver.wait.call_one("hold", 2)
        await stayer.wait.call_one("gate")
        shrunk = await procs.resize(replica=2)
        with pytest.raises(MembershipChanged) as caught:
            await held.result()
        assert caught.value.maybe_executed
        assert trimesh.origin(caught.value).point == {"replica": 2}
        executed: list[bool] = []
        for one in queued:
            with pytest.raises(MembershipChanged) as caught:
                await one.result()
            executed.append(caught.value.maybe_executed)
        assert sorted(executed) == [False, True]
        for call in (leaver.bump.call_one, leaver.bump.choose):
            with pytest.raises(MeshStopped):
                await call()
        with pytest.raises(MembershipChanged, match="has left the mesh") as caught:
            await leaver.bump.call_one()
        assert not caught.value.maybe_executed
        with pytest.raises(MeshErrorGroup) as group:
            await ledgers.bump.call()
        assert [type(leaf) for leaf in trimesh.leaves(group.value)] == [MembershipChanged]
        assert trimesh.coords(group.value) == [{"replica": 2}]
        with pytest.raises(MeshErrorGroup) as group:
            await ledgers.bump.broadcast()
        assert trimesh.coords(group.value) == [{"replica": 2}]
        assert {await ledgers.rank.choose() for _ in range(3)} == {1}  # 0 is busy
        await stayer.open_gate.call_one()
        assert await kept.result() == "gate"
        now = await trimesh.current_view(ledgers)
        assert [*(await now.bump.call()).values()] == [2, 2]  # the call of all three was sent to none of them
        assert len(shrunk) == len(shrunk.alive()) == len(ledgers.alive()) == 2


async def test_who_leaves_cleans_up_within_the_grace(backend: Backend):
    """P6: actors in reverse spawn order, then the process; longer than the grace it is ended by force."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 2}, supervision=Isolate(), grace=HANG_SECONDS) as procs,
    ):
        diary: Any = await home.spawn("diary", Ledger)
        await procs.spawn("first", Tidy, 0.1, tell=diary)
        await procs.spawn("second", Tidy, 0.1, tell=diary)
        await procs.resize(replica=1)
        notes = await diary.seen.call_one()
        assert notes == ["cleaning 1", "clean 1"] * 2
        assert len(procs.alive()) == 1
    async with backend.procs({"replica": 2}, supervision=Isolate(), grace=0.2) as procs:
        stubborn = await procs.spawn("stubborn", Tidy, 100.0)
        await procs.resize(replica=1)
        with pytest.raises(MembershipChanged):
            await stubborn.slice(replica=1).rank.call_one()
        assert await stubborn.slice(replica=0).rank.call_one() == 0
        await procs.kill([{"replica": 0}])


async def test_who_leaves_gets_nothing_while_it_cleans_up(backend: Backend):
    """P6: neither from the owner, nor from another process, which has not heard of it."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 2}, supervision=Isolate(), grace=1000.0) as procs,
        trio.open_nursery() as nursery,
    ):
        diary: Any = await home.spawn("diary", Gated)
        away: Any = await home.spawn("away", Ledger)
        first = await procs.spawn("first", Ledger)
        slow = await procs.spawn("slow", Gate, diary)
        leaver = first.slice(replica=1)
        await away.relay.call_one(slow.slice(replica=1), "rank", "call_one")
        shrinking = attempt(nursery, _resize, procs, 1)
        await diary.wait.call_one("at the gate 1")
        with pytest.raises(MembershipChanged, match="has left the mesh") as caught:
            await leaver.bump.call_one()
        assert not caught.value.maybe_executed
        assert {await first.bump.choose() for _ in range(3)} == {1, 2, 3}
        assert len(procs.alive()) == len(first.alive()) == 1
        with pytest.raises(MembershipChanged) as caught:
            await away.relay.call_one(slow.slice(replica=1), "rank", "call_one")
        assert not caught.value.maybe_executed
        await diary.let_through.call_one()
        await shrinking.result()


class Gated(Ledger):
    """Lets others wait at a gate, while it takes notes."""

    @endpoint(concurrency=100, group="gate")
    async def pass_through(self, note: str) -> None:
        self.notes.add(note)
        await self.gate.wait()

    @endpoint(concurrency=100, group="watch")
    async def let_through(self) -> None:
        self.gate.set()


class Gate(Ledger):
    """Its clean-up at the second rank waits at a gate."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.door = gate

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        if trimesh.current_rank() == 1:
            await self.door.pass_through.call_one("at the gate 1")


async def test_death_among_those_that_join_is_dealt_with_once_they_have(backend: Backend):
    """P6, P1: it has served, so growth goes on; then the policy starts it again."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 1}, supervision=restart()) as procs,
        reading(procs) as log,
        trio.open_nursery() as nursery,
    ):
        diary: Any = await home.spawn("diary", Gated)
        slow = await procs.spawn("slow", SlowStart, diary)
        growing = attempt(nursery, _resize, procs, 3)
        await diary.wait.call_one("starting 2")
        await diary.wait.call_one("started 1")
        joining = procs._owned.members.members[1].peer
        while joining.calls:  # noqa: ASYNC110 - it says that it has started on its way to saying so to its owner
            await trio.sleep(0.001)
        await kill_and_see(backend, procs, log, 1)
        await diary.let_through.call_one()
        await growing.result()
        restarted = await log.wait(Restarted)
        assert (restarted.point.rank, restarted.incarnation) == (1, 1)
        now = await trimesh.current_view(slow)
        assert [*(await now.rank.call()).values()] == [0, 1, 2]


async def test_spawn_that_outlasts_growth_catches_up(backend: Backend):
    """P6: neither waits for the other."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 3}, supervision=Isolate()) as procs,
        trio.open_nursery() as nursery,
    ):
        diary: Any = await home.spawn("diary", Gated)
        spawning = attempt(nursery, procs.spawn, "slow", SlowStart, diary)
        await diary.wait.call_one("starting 2")
        grown = await procs.resize(replica=5)
        await diary.let_through.call_one()
        slow = await trimesh.current_view(await spawning.result())
        assert len(grown) == 5
        assert [*(await slow.rank.call()).values()] == list(range(5))


class SlowStart(Ledger):
    """Its start at the third rank waits at a gate."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.door = gate

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() == 2:
            await self.door.pass_through.call_one("starting 2")
        await self.door.note.call_one(f"started {trimesh.current_rank()}")
        yield


async def test_actor_that_came_later_is_made_anew_by_its_own_policy(backend: Backend):
    """P6, P1."""
    async with backend.procs({"replica": 1}, supervision=Isolate()) as procs:
        failing = await procs.supervised(remake()).spawn("failing", Numbered)
        await procs.resize(replica=2)
        now = await trimesh.current_view(failing)
        async with reading(now) as log:
            with pytest.raises((ActorFailed, MeshStopped)):
                await now.slice(replica=1).start_failing.call_one(KeyError("background"))
                raise MeshStopped("it has answered before it failed")
            restarted = await log.wait(Restarted)
        assert (restarted.point.rank, restarted.incarnation) == (1, 1)
        assert [*(await now.rank.call()).values()] == [0, 1]


async def test_place_that_is_taken_again_has_the_next_incarnation(backend: Backend):
    """P6: handles that have shown it mean the new one."""
    async with backend.procs({"replica": 2}, supervision=Isolate()) as procs:
        ledgers = await procs.spawn("ledgers", Ranked)
        await ledgers.bump.call()
        for turn in range(1, 3):
            await procs.resize(replica=1)
            await procs.resize(replica=2)
            assert [*(await ledgers.bump.call()).values()] == [turn * 1 + 1, 1]
            assert (await ledgers.slice(replica=1).place.call_one())[:2] == (1, turn)


async def test_views_are_numbered_and_say_why(backend: Backend):
    """P7."""
    async with (
        backend.procs({"replica": 2}, supervision=restart()) as procs,
        reading(procs) as log,
        procs.membership() as views,
    ):
        first = await anext(views)
        assert places(first) == ([0, 1], [0, 1], [])
        await procs.resize(replica=3)
        second = await anext(views)
        assert places(second) == ([0, 1, 2], [2], [])
        await kill_and_wait(backend, procs, log, 0)
        third = await anext(views)
        if 0 not in [point.rank for point in third.members]:  # seen before it was healed
            assert places(third)[2] == [(0, 0, ProcDied)]
            third = await anext(views)
            assert places(third) == ([0, 1, 2], [0], [])
        else:
            assert places(third) == ([0, 1, 2], [0], [(0, 0, ProcDied)])
        await procs.replace([{"replica": 1}])
        fourth = await anext(views)
        assert places(fourth) == ([0, 1, 2], [1], [(1, 0, MeshStopped)])
        await procs.resize(replica=1)
        await procs.resize(replica=2)
        fifth = await anext(views)  # two changes as one: who has left and come back is in both
        assert places(fifth) == ([0, 1], [1], [(1, 1, MembershipChanged), (2, 0, MembershipChanged)])
        assert dict(fifth.extent) == {"replica": 2}
        epochs = [view.epoch for view in (first, second, third, fourth, fifth)]
        assert epochs == sorted(set(epochs))
        assert epochs[4] > epochs[3] + 1
        await procs.stop()
        with pytest.raises(StopAsyncIteration):
            await anext(views)


async def test_mesh_of_isolated_deaths_is_sparse(backend: Backend):
    """P7: who has died leaves a hole, which a later size does not fill."""
    async with backend.procs({"replica": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Ledger)
        await kill_and_see(backend, procs, log, 1)
        await procs.resize(replica=4)
        async with procs.membership() as views:
            assert places(await anext(views))[0] == [0, 2, 3]
        now = await trimesh.current_view(probes)
        assert [*(await now.alive().rank.call()).values()] == [0, 2, 3]
        with pytest.raises(ProcDied):
            await now.slice(replica=1).rank.call_one()


async def test_growth_that_fails_leaves_the_mesh_as_it_was(backend: Backend, tmp_path: Any):
    """P6, E11: all or nothing, whoever of them fails."""
    flag = tmp_path / "broken"
    async with backend.procs({"replica": 1}, supervision=restart()) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        await procs.spawn("fragile", Fragile, str(flag))
        flag.touch()
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.resize(replica=3)
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ValueError}
        now = await trimesh.current_view(ledgers)
        assert [*(await now.bump.call()).values()] == [1]
        async with procs.membership() as views:
            assert places(await anext(views))[0] == [0]
        flag.unlink()
        assert len(await procs.resize(replica=3)) == 3
        now = await trimesh.current_view(ledgers)
        assert [*(await now.bump.call()).values()] == [2, 1, 1]


class Late(Held):
    """Does not come to an end of its start at any rank but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_again = trimesh.current_rank() > 0


async def test_cancelled_growth_leaves_nothing(backend: Backend):
    """P6, C07."""
    async with backend.procs({"replica": 1}, supervision=Isolate()) as procs:
        await procs.spawn("late", Late)
        with trio.move_on_after(0.5) as scope:
            await procs.resize(replica=2)
        assert scope.cancelled_caught
        assert len(await trimesh.current_view(procs)) == len(procs.alive()) == 1


async def test_cancelled_shrinking_ends_at_once_who_leaves(backend: Backend):
    """P6: it is decided once it has begun."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 2}, supervision=Isolate(), grace=1000.0) as procs,
        trio.open_nursery() as nursery,
    ):
        diary: Any = await home.spawn("diary", Ledger)
        slow = await procs.spawn("slow", Tidy, 1000.0, tell=diary)
        shrinking = attempt(nursery, _resize, procs, 1)
        await diary.wait.call_one("cleaning 1")
        shrinking.cancel()
        await shrinking.over.wait()
        assert shrinking.cancelled
        assert len(await trimesh.current_view(procs)) == len(procs.alive()) == 1
        assert procs._owned.members.members[1].gone.is_set()
        with pytest.raises(MembershipChanged):
            await slow.slice(replica=1).rank.call_one()
        await procs.kill([{"replica": 0}])


async def test_block_ends_while_the_mesh_changes(backend: Backend):
    """P6, M3: whatever is under way, nothing is left."""
    for size in (1, 3):
        async with trio.open_nursery() as nursery:
            async with backend.procs({"replica": 2}, supervision=Isolate()) as procs:
                await procs.spawn("tidy", Tidy, 0.05)
                changing = attempt(nursery, _resize, procs, size)
                await trio.sleep(0.02)
            with pytest.raises((RuntimeError, MeshErrorGroup, MeshStopped)):
                await changing.result()
                raise MeshStopped("it was over before the block was left")


async def test_spawn_beside_growth_catches_up(backend: Backend):
    """P6: actors whose spawn was under way when the mesh grew are in the new processes, too."""
    async with backend.procs({"replica": 1}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        growing = attempt(nursery, _resize, procs, 3)
        spawning = [attempt(nursery, _spawn, procs, f"ledgers{number}") for number in range(4)]
        await growing.result()
        for one in spawning:
            ledgers = await trimesh.current_view(await one.result())
            assert [*(await ledgers.bump.call()).values()] == [1, 1, 1]


async def _spawn(procs: Any, name: str) -> Any:
    return await procs.spawn(name, Ledger)


async def test_members_that_came_later_are_restarted_as_the_first(backend: Backend):
    """P6, P1: their units are those of the policy; units that have left are not started."""
    policy = restart("one_for_all", along="replica", intensity=100)
    async with backend.procs({"replica": 1, "gpus": 2}, supervision=policy) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ranked)
        await procs.resize(replica=3)
        await procs.resize(replica=2)
        backend.kill(procs, 3)
        await log.wait(Restarted, 4)
        now = await trimesh.current_view(ledgers)
        assert [place[:2] for place in (await now.place.call()).values()] == [(rank, 1) for rank in range(4)]
        assert log.ranks(Restarted) == [0, 1, 2, 3]


async def test_resize_is_refused_where_it_cannot_be(backend: Backend):
    """P6: the text says why, and what to write instead."""
    async with backend.procs(SHAPE, supervision=Isolate()) as procs:
        with pytest.raises(ShapeError, match="first dimension"):
            await procs.resize(gpus=3)
        with pytest.raises(ShapeError, match="no dimension"):
            await procs.resize(hosts=3)
        with pytest.raises(ShapeError, match="at least 1"):
            await procs.resize(replica=0)
        with pytest.raises(ShapeError, match="LINKS_MAX"):
            await procs.resize(replica=10**6)
        with pytest.raises(ShapeError, match="one dimension"):
            await procs.resize(replica=1, gpus=1)
        with trio.testing.assert_checkpoints():
            assert await procs.resize(replica=2) is not procs
        with pytest.raises(TypeError, match="current_view takes"):
            await trimesh.current_view(3)
        away: Any = await procs.spawn("away", Foreign)
        text = await away.slice(replica=0, gpus=0).grow.call_one(procs)
        assert "the process that owns it" in text
        old = procs.slice(replica=1)
        await procs.resize(replica=1)
        with pytest.raises(MeshErrorGroup) as caught:
            await old.spawn("late", Ledger)
        assert trimesh.leaves(caught.value)
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {MembershipChanged}
    async with backend.procs(supervision=FailFast()) as procs:
        with pytest.raises(RuntimeError, match="FailFast"):
            await procs.resize(gpus=3)
    async with backend.procs(supervision=Isolate(), rendezvous=True) as procs:
        with pytest.raises(RuntimeError, match="WORLD_SIZE"):
            await procs.resize(gpus=3)
    with pytest.raises(RuntimeError, match="this_proc"):
        await this_proc().resize(gpus=1)
    with pytest.raises(RuntimeError, match="this_proc"):
        this_proc().membership()


class Foreign(Ledger):
    """Uses a handle on processes that another process owns."""

    @endpoint
    async def grow(self, procs: Any) -> str:
        try:
            await procs.resize(replica=5)
        except RuntimeError as error:
            return str(error)
        return ""


@only_sim
async def test_changes_of_size_come_one_after_the_other(backend: Backend):
    """P6."""
    async with backend.procs({"replica": 1}, supervision=Isolate()) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        async with trio.open_nursery() as nursery:
            for size in (4, 2, 5, 1, 3):
                nursery.start_soon(_resize, procs, size)
        now = await trimesh.current_view(ledgers)
        assert len(await now.bump.call()) == len(await trimesh.current_view(procs))


@only_sim
@pytest.mark.seeds(20)
async def test_replacement_of_a_place_that_leaves_starts_nothing(backend: Backend):
    """P7: both wait for a restart; if the resize is first, the replacement is refused, and its place is free."""
    async with backend.procs({"replica": 3}, supervision=restart()) as procs, reading(procs) as log:
        backend.kill(procs, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_replace, procs, 2)
            nursery.start_soon(_resize, procs, 2)
        await log.wait(Restarted)
        assert len(await procs.resize(replica=3)) == 3


async def _replace(procs: Any, rank: int) -> None:
    with suppress(MembershipChanged):
        await procs.replace([{"replica": rank}])


async def _resize(procs: Any, size: int) -> None:
    await procs.resize(replica=size)
