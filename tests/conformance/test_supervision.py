"""Restarts of processes (R01-R09, R11; rules P2-P4, M2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import Fragile, Ledger, kill_and_wait, reading, restart

import trimesh
from trimesh import (
    Backoff,
    Died,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restart,
    Restarted,
    Restarting,
    ShapeError,
    Unresponsive,
    endpoint,
    this_proc,
)


@pytest.mark.daily("real")
async def test_dead_process_is_restarted_with_its_actors(backend: Backend):
    """R01, R09: the in-flight call gets `ProcDied`; the next one waits, and is served by the next incarnation."""
    async with backend.procs(supervision=restart()) as procs, trio.open_nursery() as nursery:
        ledgers = await procs.spawn("ledgers", Ledger, 7, by="hand")
        assert (await ledgers.bump.call()).item(gpus=1) == 1
        target = ledgers.slice(gpus=1)
        held = attempt(nursery, target.hold_many.call_one)
        await target.wait.call_one("hold")
        backend.kill(procs, 1)
        with pytest.raises(ProcDied) as caught:
            await held.result()
        assert caught.value.maybe_executed
        assert trimesh.origin(caught.value).point == {"gpus": 1}
        assert trimesh.origin(caught.value).incarnation == 0

        assert await target.bump.call_one() == 1
        assert await target.origin_of.call_one() == ((7,), {"by": "hand"})
        assert await ledgers.slice(gpus=0).bump.call_one() == 2, "the bystander has kept its state (R07)"


@pytest.mark.parametrize(
    ("strategy", "restarted"),
    [("one_for_one", [1]), ("one_for_all", [0, 1, 2]), ("rest_for_one", [1, 2])],
)
async def test_strategy_restarts_the_right_members(backend: Backend, strategy: str, restarted: list[int]):
    """R01-R03, R07: in spawn order; all others keep their state."""
    async with backend.procs({"gpus": 3}, supervision=restart(strategy)) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        await ledgers.bump.call()
        backend.kill(procs, 1)
        await log.wait(Restarted, len(restarted))
        counts = (await ledgers.bump.call()).values()

        assert log.ranks(Restarted) == restarted
        assert log.ranks(Died) == [1]
        assert list(counts) == [1 if rank in restarted else 2 for rank in range(3)]
        assert [event.incarnation for event in log.of(Restarted)] == [1] * len(restarted)


async def test_unit_is_the_slice_along_a_dimension(backend: Backend):
    """R01: `along=` restarts the whole replica, and no other."""
    shape = {"replica": 2, "gpus": 2}
    async with backend.procs(shape, supervision=restart(along="replica")) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        await ledgers.bump.call()
        backend.kill(procs, 3)
        await log.wait(Restarted, 2)

        assert [dict(event.point) for event in log.of(Restarted)] == [
            {"replica": 1, "gpus": 0},
            {"replica": 1, "gpus": 1},
        ]
        assert list((await ledgers.bump.call()).values()) == [2, 2, 1, 1]


async def test_unit_that_is_taken_down_on_purpose_raises_mesh_stopped(backend: Backend):
    """P3: calls in flight to it raise `MeshStopped`, those to the dead one `ProcDied`; clean-up runs."""
    async with (
        this_proc().spawn("keeper", Probe) as keeper,
        backend.procs({"gpus": 3}, supervision=restart("one_for_all")) as procs,
        reading(procs) as log,
        trio.open_nursery() as nursery,
    ):
        first = await procs.spawn("first", Tidying, keeper, "first")
        await procs.spawn("second", Tidying, keeper, "second")
        calls = [attempt(nursery, first.slice(gpus=rank).hold_many.call_one) for rank in range(3)]
        await first.wait.call("hold")
        backend.kill(procs, 0)
        await log.wait(Restarted, 3)
        found = []
        for call in calls:
            await call.over.wait()
            found.append(type(call.error))
        notes = await keeper.seen.call_one()

        assert found == [ProcDied, MeshStopped, MeshStopped]
        assert sorted(notes) == [f"{name} {rank}" for name in ("first", "second") for rank in (1, 2)]
        for rank in (1, 2):
            assert notes.index(f"second {rank}") < notes.index(f"first {rank}"), "the last spawned goes first"


class Tidying(Probe):
    """Tells a keeper when it has cleaned up."""

    def __init__(self, keeper: Probe, name: str) -> None:
        super().__init__()
        self.keeper, self.name_of_mine = keeper, name

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        await self.keeper.note.call_one(f"{self.name_of_mine} {trimesh.current_rank()}")


async def test_actor_meshes_come_back_in_spawn_order(backend: Backend):
    """API 6: an actor finds what was spawned before it, by the handle in its arguments."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        store = await procs.spawn("store", Ledger, "store")
        users = await procs.spawn("users", Using, store)
        await kill_and_wait(backend, procs, log, 1)
        assert (await users.found_first.call()).item(gpus=1) == (("store",), {})


class Using(Probe):
    """Calls the actor beside it while it starts."""

    def __init__(self, store: Ledger) -> None:
        super().__init__()
        self.store = store
        self.found: Any = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        self.found = await self.store.slice(gpus=trimesh.current_rank()).origin_of.call_one()
        yield

    @endpoint
    async def found_first(self) -> Any:
        return self.found


@pytest.mark.by_value
async def test_setup_runs_again_in_the_next_incarnation(backend: Backend, tmp_path: Any):
    path = tmp_path / "setups"

    def setup() -> None:
        with path.open("a") as file:
            file.write(f"{trimesh.current_rank()}\n")

    async with backend.procs(setup=setup, supervision=restart()) as procs, reading(procs) as log:
        await kill_and_wait(backend, procs, log, 1)
        assert sorted(path.read_text().split()) == ["0", "1", "1"]


async def test_incarnation_grows_with_each_restart(backend: Backend):
    """API 6: the same rank, a new incarnation; the context of the actor knows it."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Incarnate)
        for incarnation in (1, 2):
            event = await kill_and_wait(backend, procs, log, 0)
            assert event.incarnation == incarnation
            assert await probes.slice(gpus=0).incarnation.call_one() == incarnation
        assert await probes.slice(gpus=1).incarnation.call_one() == 0


class Incarnate(Probe):
    @endpoint
    async def incarnation(self) -> int:
        return trimesh.context().incarnation


# ---- time ------------------------------------------------------------------------------------------------------------


@only_sim
async def test_backoff_passes_before_each_restart(backend: SimBackend):
    """API 6: 1 s, then 2 s, of virtual time."""
    backoff = Backoff(1.0, cap=10, factor=2, jitter=0)
    async with backend.procs(supervision=restart(backoff=backoff)) as procs, reading(procs) as log:
        for seconds in (1.0, 2.0):
            start = trio.current_time()
            await kill_and_wait(backend, procs, log, 0)
            assert trio.current_time() - start == pytest.approx(seconds, abs=0.1)


async def test_cancel_during_backoff_exits_at_once(backend: Backend):
    """R06: the block is left while a member waits to be started; nothing is left behind."""
    policy = restart(backoff=Backoff(1000.0, cap=1000.0))
    start = trio.current_time()
    with trio.CancelScope() as scope:
        async with backend.procs(supervision=policy) as procs, reading(procs) as log:
            probes = await procs.spawn("probes", Probe)
            backend.kill(procs, 1)
            await log.wait(Restarting)
            scope.cancel()
            await probes.rank.call()
    assert scope.cancelled_caught
    if backend.is_sim:
        assert trio.current_time() - start < 20.0


async def test_deadline_ends_the_wait_for_a_restart(backend: Backend):
    """R06: a call waits within its caller's own scope."""
    policy = restart(backoff=Backoff(1000.0, cap=1000.0))
    async with backend.procs(supervision=policy) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        backend.kill(procs, 1)
        await log.wait(Restarting)
        with trio.move_on_after(0.1) as scope:
            await probes.slice(gpus=1).rank.call_one()
        assert scope.cancelled_caught
        with pytest.raises(trio.WouldBlock):
            probes.rank.broadcast_nowait()
        assert await probes.rank.choose() == 0, "choose prefers members that live"


async def test_spawn_waits_for_a_member_that_restarts(backend: Backend):
    """M2."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        backend.kill(procs, 1)
        await log.wait(Restarting)
        probes = await procs.spawn("probes", Probe)
        assert list((await probes.rank.call()).values()) == [0, 1]


async def test_block_that_ends_normally_does_not_wait_for_a_restart(backend: Backend):
    """M3: the healing stops when the block begins to stop; that is no failure."""
    policy = restart(backoff=Backoff(1000.0, cap=1000.0))
    async with backend.procs(supervision=policy) as procs, reading(procs) as log:
        await procs.spawn("probes", Probe)
        backend.kill(procs, 1)
        await log.wait(Restarting)


async def test_block_of_actors_ends_while_their_process_restarts(backend: Backend, tmp_path: Any):
    async with backend.procs(supervision=restart(intensity=100)) as procs, reading(procs) as log:
        flag = tmp_path / "broken"
        async with procs.spawn("fragile", Fragile, str(flag)):
            flag.touch()
            backend.kill(procs, 1)
            await log.wait(Restarting, 1)
        await log.wait(Restarted)
        probes = await procs.spawn("probes", Probe)
        assert list((await probes.rank.call()).values()) == [0, 1]


async def test_restart_is_refused_for_a_dimension_that_is_not_there(backend: Backend):
    with pytest.raises(ShapeError, match="'gpus'"):
        backend.procs(supervision=restart(along="replica"))
    async with backend.procs() as procs:
        with pytest.raises(ShapeError, match="'gpus'"):
            procs.supervised(restart(along="replica")).spawn("probes", Probe)


async def test_listing_of_the_contract(backend: Backend):
    """API 6."""
    seen: list[tuple[str, int]] = []
    async with backend.procs({"replica": 2, "gpus": 2}, supervision=Restart(
            "one_for_one", along="replica", intensity=3, period=60, backoff=Backoff(0.1, cap=5),
            on=(ProcDied, Unresponsive))) as procs:  # fmt: skip
        generators = await procs.spawn("generators", Ledger)
        async with procs.events() as events:
            backend.kill(procs, 2)
            async for event in events:
                if not isinstance(event, trimesh.Lagged):
                    seen.append((type(event).__name__, event.point.rank))
                if seen.count(("Restarted", 3)):
                    break
        assert [*(await generators.bump.call()).values()] == [1, 1, 1, 1]
    assert seen[4:] == [("Died", 2), ("Restarting", 2), ("Restarting", 3), ("Restarted", 2), ("Restarted", 3)]


async def test_spawn_that_loses_a_process_fails_and_leaves_nothing(backend: Backend):
    """E11, M2: the process comes back, without the actor; the next spawn is whole."""
    async with (
        this_proc().spawn("keeper", Keeper) as keeper,
        backend.procs(supervision=restart()) as procs,
        reading(procs) as log,
        trio.open_nursery() as nursery,
    ):

        async def spawn() -> Any:
            return await procs.spawn("slow", SlowToStart, keeper)

        starting = attempt(nursery, spawn)
        await keeper.wait.call_one("starting", 2)
        await kill_and_wait(backend, procs, log, 1)
        with pytest.raises(MeshErrorGroup) as caught:
            await starting.result()
        assert kinds(caught.value) == [ProcDied]
        await keeper.open_gate.call_one()
        probes = await procs.spawn("slow", SlowToStart, keeper)
        assert [*(await probes.rank.call()).values()] == [0, 1]


class SlowToStart(Probe):
    """Serves when the keeper's gate is open."""

    def __init__(self, keeper: Probe) -> None:
        super().__init__()
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        await self.keeper.note.call_one("starting")
        await self.keeper.wait_at_gate.call_one()
        yield


class Keeper(Probe):
    @endpoint(concurrency=10)
    async def wait_at_gate(self) -> None:
        await self.gate.wait()
