"""Handles that outlive the processes that they mean (API 6, R08; rules M2, MS-1, MS-2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import Ledger, kill_and_see, kill_and_wait, reading, restart

import trimesh
from trimesh import Isolate, MeshErrorGroup, MeshStopped, ProcDied, Restarting, endpoint, leaves, limits
from trimesh._runtime.calls import Membership, Standing, membership_of
from trimesh._runtime.life.current import current_proc
from trimesh.actor.actor_mesh import is_lost


class Holder(Probe):
    """Keeps a handle on another mesh."""

    def __init__(self, target: Probe | None = None) -> None:
        super().__init__()
        self.target = target

    @endpoint(concurrency=10)
    async def use(self, name: str, rank: int) -> object:
        assert self.target is not None
        return await getattr(self.target.slice(gpus=rank), name).call_one()

    @endpoint
    async def living(self) -> int:
        assert self.target is not None
        return len(self.target.alive())

    @endpoint
    async def pick(self) -> int:
        assert self.target is not None
        return await self.target.rank.choose()


def table_of(name: str) -> Membership:
    """Return what this process, which owns a mesh, knows of it."""
    [found] = [one for one in current_proc().memberships.values() if one.info.name == name]
    return found


class Gated(Ledger):
    """Starts at once the first time, then when a gate elsewhere is open."""

    def __init__(self, gate: Probe) -> None:
        super().__init__()
        self.shut = gate

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.context().incarnation > 0:
            await self.shut.wait_for_gate.call_one()
        yield


@pytest.mark.parametrize("has_called_before", [True, False])
async def test_reference_follows_the_next_incarnation(backend: Backend, has_called_before: bool):
    """API 6: a holder elsewhere asks the owner for the replacement, whether it had a link to the dead one or not."""
    async with backend.procs({"gpus": 1}, name="others") as others, backend.procs(supervision=restart()) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        holder = await others.spawn("holder", Holder, ledgers)
        async with reading(procs) as log:
            for _ in range(2):
                if has_called_before:
                    await holder.use.call_one("bump", 1)
                await kill_and_wait(backend, procs, log, 1)
                await ask_until_it_answers(holder)
                assert await ledgers.slice(gpus=1).bump.call_one() == 2


async def ask_until_it_answers(holder: Holder) -> None:
    """A call that leaves before the holder has heard of the death is in flight to the dead one (R09)."""
    while True:
        try:
            assert await holder.use.call_one("bump", 1) == 1
        except ProcDied:
            continue
        return


async def test_call_from_elsewhere_waits_for_the_restart(backend: Backend):
    """API 6: within the caller's own scope."""
    async with backend.procs({"gpus": 1}, name="others") as others, backend.procs(supervision=restart()) as procs:
        gate = await others.spawn("gate", Probe)
        ledgers = await procs.spawn("ledgers", Gated, gate)
        holder = await others.spawn("holder", Holder, ledgers)
        async with reading(procs) as log, trio.open_nursery() as nursery:
            held = attempt(nursery, holder.use.call_one, "hold_many", 1)
            await ledgers.slice(gpus=1).wait.call_one("hold")
            backend.kill(procs, 1)
            await log.wait(Restarting)
            with pytest.raises(ProcDied):
                await held.result()
            await gate.wait.call_one("gate")
            with trio.move_on_after(0.05) as scope:
                await holder.use.call_one("bump", 1)
            assert scope.cancelled_caught
            await gate.open_gate.call_one()
            assert await holder.use.call_one("bump", 1) == 1


@pytest.mark.daily("real")
async def test_reference_learns_of_a_replacement(backend: Backend):
    """API 6: the holder's `alive()` and `choose` too."""
    async with (
        backend.procs({"gpus": 1}, name="others") as others,
        backend.procs(supervision=Isolate()) as procs,
        reading(procs) as log,
    ):
        ledgers = await procs.spawn("ledgers", Ledger)
        holder = await others.spawn("holder", Holder, ledgers)
        assert await holder.use.call_one("bump", 1) == 1
        await kill_and_see(backend, procs, log, 1)
        with pytest.raises(ProcDied):
            await holder.use.call_one("bump", 1)
        assert await holder.living.call_one() == 1
        assert {await holder.pick.call_one() for _ in range(3)} == {0}
        await procs.replace([{"gpus": 1}])
        assert await holder.use.call_one("bump", 1) == 1
        assert await holder.living.call_one() == 2


async def test_reference_that_is_sent_again_brings_the_news(backend: Backend):
    """MS-1."""
    async with (
        backend.procs({"gpus": 1}, name="others") as others,
        backend.procs(supervision=restart()) as procs,
        reading(procs) as log,
    ):
        relay = await others.spawn("relay", Probe)
        ledgers = await procs.spawn("ledgers", Ledger)
        assert await relay.relay.call_one(ledgers.slice(gpus=0), "rank", "call_one") == 0
        await kill_and_wait(backend, procs, log, 1)
        assert await relay.relay.call_one(ledgers.slice(gpus=1), "bump", "call_one") == 1


async def test_reference_to_a_mesh_that_has_stopped_says_so(backend: Backend):
    async with backend.procs({"gpus": 1}, name="others") as others:
        async with backend.procs(supervision=restart()) as procs:
            ledgers = await procs.spawn("ledgers", Ledger)
            holder = await others.spawn("holder", Holder, ledgers)
            assert await holder.use.call_one("bump", 1) == 1
        with pytest.raises((MeshStopped, ProcDied)):
            await holder.use.call_one("bump", 1)


async def test_member_elsewhere_uses_its_siblings_after_a_restart(backend: Backend):
    """A handle among the arguments of an actor is good in its next incarnation, too, though what it names is older."""
    async with backend.procs(supervision=restart("one_for_all")) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        holders = await procs.spawn("holders", Holder, ledgers)
        for _ in range(2):
            await kill_and_wait(backend, procs, log, 1)
            await log.wait(trimesh.Restarted, len(log.of(Restarting)))
            assert [*(await holders.use.call("bump", 0)).values()] in ([1, 2], [2, 1])


async def test_origin_names_the_incarnation_that_was_called(backend: Backend):
    """API 4: of an error, and of a death."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        await kill_and_wait(backend, procs, log, 1)
        with pytest.raises(MeshErrorGroup) as caught:
            await probes.fail.call(KeyError("raised"), [0, 1])
        found = {
            origin.point["gpus"]: origin.incarnation for origin in map(trimesh.origin, leaves(caught.value)) if origin
        }
        assert found.items() <= {0: 0, 1: 1}.items()
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, probes.slice(gpus=1).hold_many.call_one)
            await probes.slice(gpus=1).wait.call_one("hold")
            backend.kill(procs, 1)
            with pytest.raises(ProcDied) as died:
                await held.result()
        assert trimesh.origin(died.value).incarnation == 1


@only_sim
async def test_frames_of_an_old_incarnation_are_not_delivered(backend: SimBackend):
    """R08: a reply that is on its way when its process dies reaches no caller; the replacement's does."""
    async with backend.procs({"gpus": 1}, supervision=restart()) as procs, reading(procs) as log:
        probe = await procs.spawn("probe", Probe)
        old, me = procs._owned.info.members[0].proc_id, current_proc().proc_id
        backend.lag.links[old, me] = (100.0, 100.0)
        async with trio.open_nursery() as nursery:
            late = attempt(nursery, probe.note.call_one, "old")
            await trio.sleep(1.0)
            await kill_and_wait(backend, procs, log, 0)
            with pytest.raises(ProcDied) as caught:
                await late.result()
            assert caught.value.maybe_executed
            dropped = current_proc().dropped_replies
            assert await probe.note.call_one("new") == "new"
            await trio.sleep(200.0)
            assert await probe.seen.call_one() == ["new"]
            assert current_proc().dropped_replies == dropped


@only_sim
async def test_owner_waits_for_a_death_that_the_asker_knows_of_first(backend: SimBackend):
    """MS-2: it is asked who follows a member that lives, as far as it knows, and says so when it has heard."""
    async with backend.procs({"gpus": 1}, supervision=restart()) as procs, trio.open_nursery() as nursery:
        await procs.spawn("ledgers", Ledger)
        membership = table_of("ledgers")
        [member] = membership.members
        async with reading(procs) as log:
            asked = attempt(nursery, membership.answer, 0, member.incarnation)
            await trio.testing.wait_all_tasks_blocked()
            assert not asked.over.is_set()
            await kill_and_wait(backend, procs, log, 0)
            place = await asked.result()
        assert place is not None
        assert (place[0] != member.proc_id, place[3]) == (True, member.incarnation + 1)


@only_sim
async def test_owner_answers_as_soon_as_it_knows(backend: SimBackend):
    """MS-2: with the next incarnation of a rank, also long after; none for one that lives, or has no next one."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        await procs.spawn("ledgers", Ledger)
        membership = table_of("ledgers")
        first, other = membership.members
        start = trio.current_time()
        assert await membership.answer(1, other.incarnation) is None
        assert trio.current_time() - start == limits.REPLACEMENT_SECONDS
        await kill_and_wait(backend, procs, log, 0)
        start, now = trio.current_time(), membership.members[0]
        assert await membership.answer(0, first.incarnation) == (now.proc_id, now.host, now.pid, now.incarnation)
        assert trio.current_time() == start
    async with backend.procs(supervision=Isolate(), name="isolated") as procs, reading(procs) as log:
        await procs.spawn("isolated", Ledger)
        membership = table_of("isolated")
        await kill_and_see(backend, procs, log, 0)
        start = trio.current_time()
        assert await membership.answer(0, 0) is None
        assert trio.current_time() == start


@only_sim
async def test_table_takes_over_what_is_newer(backend: SimBackend):
    """MS-1: of each rank by its incarnation; the owner takes over nothing."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        await procs.spawn("ledgers", Ledger)
        owners = table_of("ledgers")
        old = owners.info
        await kill_and_wait(backend, procs, log, 1)
        new = owners.info
        assert [member.incarnation for member in new.members] == [0, 1]
        assert membership_of(current_proc(), old) is owners
        assert owners.info is new
        table = Membership(current_proc(), old)
        table.learn(new)
        assert (table.members, table.news) == (new.members, [0, 1])
        table.learn(old)
        assert (table.members, table.news) == (new.members, [0, 1])
        table.set(0, Standing.GONE)
        table.learn(new)
        assert table.standings == [Standing.GONE, Standing.LIVE]


class Judge(Holder):
    @endpoint
    async def judge(self) -> list[bool]:
        assert self.target is not None
        return [is_lost(self.target.slice(gpus=rank)) for rank in range(2)]

    @endpoint
    async def members(self) -> list[tuple[int, str, int, int]]:
        return members_of(self.target)


def members_of(mesh: Any) -> list[tuple[int, str, int, int]]:
    """Return process, host, pid and incarnation of each member, as this process knows them."""
    members = mesh._view.membership(current_proc()).members
    return [(one.proc_id, one.host, one.pid, one.incarnation) for one in members]


@only_sim
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_member_is_lost_if_none_comes_in_its_place(backend: SimBackend, *, is_restarted: bool):
    """M2: for the owner and elsewhere, as soon as the death is known there."""
    policy = restart() if is_restarted else Isolate()
    async with backend.procs({"gpus": 1}, name="others") as others, backend.procs(supervision=policy) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        judge = await others.spawn("judge", Judge, ledgers)
        assert await judge.use.call_one("bump", 1) == 1
        assert await judge.judge.call_one() == [False, False]
        backend.kill(procs, 1)
        await trio.sleep(1)
        expected = [False, not is_restarted]
        assert await judge.judge.call_one() == expected
        assert [is_lost(ledgers.slice(gpus=rank)) for rank in range(2)] == expected
        assert is_lost(ledgers) is not is_restarted
        if is_restarted:
            assert await judge.use.call_one("bump", 1) == 1
            assert members_of(ledgers)[1][3] == 1
        assert await judge.members.call_one() == members_of(ledgers)
