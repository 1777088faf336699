"""Meshes that go on without their dead (API 6, rules P3, X3, C2), and what heals them by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meeting import come, make_meetings, meet
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, kinds, only_real, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import Ledger, kill_and_see, reading, restart
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    Died,
    Failed,
    FailFast,
    Isolate,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restarted,
    Restarting,
    ShapeError,
    Unacknowledged,
    Unresponsive,
    endpoint,
    limits,
    this_proc,
)


async def test_block_goes_on_without_a_dead_member(backend: Backend):
    """API 6, X3: calls that address it raise `ProcDied` in their group; `alive` and `exclude` give the rest."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, ledgers.slice(gpus=1).hold_many.call)
            await ledgers.slice(gpus=1).wait.call("hold")
            await kill_and_see(backend, procs, log, 1)
            with pytest.raises(MeshErrorGroup) as caught:
                await held.result()
        (leaf,) = trimesh.leaves(caught.value)
        assert isinstance(leaf, ProcDied)
        assert leaf.maybe_executed

        with pytest.raises(MeshErrorGroup) as caught:
            await ledgers.bump.call()
        assert kinds(caught.value) == [ProcDied]
        (leaf,) = trimesh.leaves(caught.value)
        assert isinstance(leaf, ProcDied)
        assert not leaf.maybe_executed
        healthy = ledgers.exclude(trimesh.coords(caught.value))
        assert [*(await healthy.rank.call()).values()] == [0, 2]
        assert [*(await ledgers.alive().rank.call()).values()] == [0, 2]
        assert {await ledgers.rank.choose() for _ in range(4)} == {0, 2}
        assert len(procs.alive()) == 2
        others = await procs.alive().spawn("others", Probe)
        assert [*(await others.rank.call()).values()] == [0, 2]


async def test_settled_call_shows_the_dead_member(backend: Backend):
    async with backend.procs(supervision=Isolate()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        await kill_and_see(backend, procs, log, 0)
        outcomes = await probes.rank.call_settled()
        assert isinstance(outcomes.item(gpus=0).error, ProcDied)
        assert outcomes.item(gpus=1).value == 1


async def test_choose_without_a_live_member_says_so(backend: Backend):
    """M6."""
    async with backend.procs({"gpus": 1}, supervision=Isolate()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        await kill_and_see(backend, procs, log, 0)
        with pytest.raises(MeshStopped):
            await probes.rank.choose()


async def test_failed_broadcast_is_an_event(backend: Backend):
    """P3: of a live actor, under `Isolate`."""
    async with backend.procs(supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Probe)
        async with reading(probes) as log:
            await probes.fail.broadcast(KeyError("lost"), [1])
            event = await log.wait(Failed)
            assert event.point == {"gpus": 1}
            assert isinstance(event.error, KeyError)
        assert [*(await probes.rank.call()).values()] == [0, 1]


async def test_fail_fast_fails_only_on_what_it_names(backend: Backend):
    """P2."""
    async with backend.procs(supervision=FailFast(on=(trimesh.ActorFailed,))) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        await kill_and_see(backend, procs, log, 0)
        with pytest.raises(ProcDied):
            await probes.slice(gpus=0).rank.call_one()
        assert await probes.slice(gpus=1).rank.call_one() == 1


# ---- replace ---------------------------------------------------------------------------------------------------------


async def test_replace_heals_the_dead(backend: Backend):
    """API 6: the same handle means the new process, which has its actors."""
    async with backend.procs(supervision=Isolate()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger, "made")
        await ledgers.bump.call()
        died = await kill_and_see(backend, procs, log, 1)
        await procs.replace([died.point])
        assert [*(await ledgers.bump.call()).values()] == [2, 1]
        assert await ledgers.slice(gpus=1).origin_of.call_one() == (("made",), {})
        assert log.names() == ["Started 0.0", "Started 1.0", "Died 1.0", "Restarting 1.0", "Restarted 1.1"]


async def test_replace_takes_the_living_down(backend: Backend):
    """P3: their calls raise `MeshStopped`; it counts as no failure."""
    policy = restart(intensity=0)
    async with backend.procs(supervision=policy) as procs, reading(procs) as log, trio.open_nursery() as nursery:
        ledgers = await procs.spawn("ledgers", Ledger)
        await ledgers.bump.call()
        held = attempt(nursery, ledgers.slice(gpus=0).hold_many.call_one)
        await ledgers.slice(gpus=0).wait.call_one("hold")
        await procs.replace([{"gpus": 0}])
        with pytest.raises(MeshStopped):
            await held.result()
        assert [*(await ledgers.bump.call()).values()] == [1, 2]
        assert log.of(Died) == []


@pytest.mark.by_value
async def test_replace_that_fails_leaves_the_member_dead(backend: Backend, tmp_path: Any):
    flag = tmp_path / "broken"

    def setup() -> None:
        if flag.exists():
            raise KeyError("broken")

    async with backend.procs(setup=setup, supervision=Isolate()) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        died = await kill_and_see(backend, procs, log, 1)
        flag.touch()
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.replace([died.point])
        assert KeyError in kinds(caught.value)
        assert len(probes.alive()) == 1
        with pytest.raises((ProcDied, MeshStopped)):
            await probes.slice(gpus=1).rank.call_one()
        flag.unlink()
        await procs.replace([died.point])
        assert [*(await probes.rank.call()).values()] == [0, 1]


async def test_cancelled_replace_leaves_nothing(backend: Backend):
    async with backend.procs(supervision=Isolate()) as procs, reading(procs) as log:
        await procs.spawn("probes", Held)
        died = await kill_and_see(backend, procs, log, 1)
        with trio.move_on_after(0.5) as scope:
            await procs.replace([died.point])
        assert scope.cancelled_caught
        assert len(procs.alive()) == 1


class Held(Probe):
    """Starts at once the first time, never again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_again = trimesh.context().incarnation > 0

    def lifespan(self) -> Any:
        return _sleeping() if self.is_again else _at_once()


class _at_once:  # noqa: N801
    async def __aenter__(self) -> None:
        await trio.lowlevel.checkpoint()

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


class _sleeping(_at_once):  # noqa: N801
    async def __aenter__(self) -> None:
        await trio.sleep_forever()


async def test_heal_starts_what_is_gone_and_nothing_else(backend: Backend):
    """API 6: of the view that it is given; handles mean the new processes."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        await ledgers.bump.call()
        await kill_and_see(backend, procs, log, 0)
        await kill_and_see(backend, procs, log, 2)
        part = procs.slice(gpus=slice(1, 3))
        assert await trimesh.heal(part) is part
        assert len(procs.alive()) == 2
        assert await trimesh.heal(procs) is procs
        assert [*(await ledgers.bump.call()).values()] == [1, 2, 1]
        with trio.testing.assert_checkpoints():
            await trimesh.heal(procs)
        assert [event.incarnation for event in log.of(Restarted)] == [1, 1]


async def test_heal_waits_for_what_its_policy_starts_again(backend: Backend):
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        await kill_and_see(backend, procs, log, 1)
        await trimesh.heal(procs)
        assert len(procs.alive()) == 2
        assert [*(await ledgers.bump.call()).values()] == [1, 1]
        assert [event.incarnation for event in log.of(Restarted)] == [1]


async def test_heal_refuses_what_it_cannot_do(backend: Backend):
    async with backend.procs() as procs:
        probes: Any = await procs.spawn("probes", Probe)
        with pytest.raises(TypeError, match="heal takes a mesh of processes"):
            await trimesh.heal(probes)
        with pytest.raises(RuntimeError, match="FailFast"):
            await trimesh.heal(procs)
    with pytest.raises(RuntimeError, match="this_proc"):
        await trimesh.heal(this_proc())


async def test_replace_refuses_what_it_cannot_do(backend: Backend):
    async with backend.procs() as procs:
        with pytest.raises(RuntimeError, match="FailFast"):
            await procs.replace([{"gpus": 0}])
    async with backend.procs(supervision=Isolate()) as procs:
        with pytest.raises(ShapeError):
            await procs.replace([{"gpus": 7}])
    with pytest.raises(RuntimeError, match="this_proc"):
        await this_proc().replace([])


# ---- silent members --------------------------------------------------------------------------------------------------


class Deaf(Probe):
    @endpoint(concurrency=10)
    async def ignore(self) -> None:
        """Hear no cancel for a minute."""
        self.notes.add("ignoring")
        with trio.CancelScope(shield=True):
            await trio.sleep(60.0)


@only_sim
@pytest.mark.parametrize("is_caller_elsewhere", [False, True])
async def test_unresponsive_member_is_an_event(backend: SimBackend, is_caller_elsewhere: bool):
    """C2: told by the caller to the owner, wherever the caller is; it fails nothing by itself."""
    async with backend.procs({"gpus": 1}, name="others") as others, backend.procs(grace=100) as procs:
        relay = await others.spawn("relay", Probe)
        deaf = await procs.spawn("deaf", Deaf)
        target = deaf.slice(gpus=1)
        async with reading(deaf) as log, reading(procs) as proc_log:
            with trio.move_on_after(1.0):
                if is_caller_elsewhere:
                    await relay.relay.call_one(target, "ignore", "call_one")
                else:
                    await target.ignore.call_one()
            event = await log.wait(Unacknowledged)
            assert event.point == {"gpus": 1}
            assert isinstance(event.error, Unresponsive)
            assert (await proc_log.wait(Unacknowledged)).point == {"gpus": 1}
        assert await target.rank.call_one() == 1


@only_sim
async def test_unresponsive_member_is_restarted_if_the_policy_names_it(backend: SimBackend):
    """C2, C13: its process is killed; what else it ran ends in `ProcDied`."""
    policy = restart(on=(Unresponsive,))
    async with (
        backend.procs(supervision=policy) as procs,
        reading(procs) as log,
        trio.open_nursery() as nursery,
    ):
        deaf = await procs.spawn("deaf", Deaf)
        target = deaf.slice(gpus=1)
        held = attempt(nursery, target.hold_many.call_one)
        await target.wait.call_one("hold")
        with trio.move_on_after(1.0):
            await target.ignore.call_one()
        restarting = await log.wait(Restarting)
        assert isinstance(restarting.cause, Unresponsive)
        await log.wait(Restarted)
        with pytest.raises(ProcDied):
            await held.result()
        assert await target.rank.call_one() == 1


@only_sim
async def test_unresponsive_member_fails_the_block_if_the_policy_names_it(backend: SimBackend):
    """C2, P2."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(supervision=FailFast(on=(Unresponsive,)), grace=100) as procs:
            deaf = await procs.spawn("deaf", Deaf)
            with trio.move_on_after(1.0):
                await deaf.slice(gpus=1).ignore.call_one()
            await trio.sleep_forever()
    assert kinds(caught.value) == [Unresponsive]


class Stuck(Probe):
    @endpoint(group="compute")
    def compute(self, started: str) -> None:
        """Keep the main thread of the process, which hears nothing meanwhile."""
        come(started)
        time.sleep(60.0)


@only_real
async def test_process_that_hears_no_cancel_is_restarted_if_the_policy_names_it(
    backend: RealBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """C13: a plain function is not interrupted; its process is killed only because the policy says so."""
    monkeypatch.setattr("trimesh.limits.CANCEL_ACK_SECONDS", 0.3)
    (started,) = make_meetings(tmp_path, "started")
    policy = restart(on=(Unresponsive,))
    async with backend.procs(supervision=policy) as procs, reading(procs) as log, trio.open_nursery() as nursery:
        stuck = await procs.spawn("stuck", Stuck)
        target = stuck.slice(gpus=1)
        computing = attempt(nursery, target.compute.call_one, started)
        await meet(started)
        computing.cancel()
        await computing.over.wait()
        assert computing.cancelled
        event = await log.wait(Restarted)
        assert event.incarnation == 1
        assert [type(event).__name__ for event in log.events[2:]] == [
            "Unacknowledged",
            "Restarting",
            "Died",
            "Restarted",
        ]
        assert await target.rank.call_one() == 1


async def test_member_that_ended_long_ago_is_called_in_vain(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """API 6: however many processes have ended since, its owner knows how it has."""
    monkeypatch.setattr(limits, "GONE_PEERS", 2)
    monkeypatch.setattr(limits, "DEATHS", 1)
    async with (
        backend.procs({"gpus": 2}, supervision=Isolate(), name="first") as first,
        backend.procs({"gpus": 1}, supervision=restart(intensity=9), name="second") as second,
        reading(first) as log,
        reading(second) as others,
    ):
        ledgers = await first.spawn("ledgers", Ledger)
        await kill_and_see(backend, first, log, 1)
        for count in range(4):
            await kill_and_see(backend, second, others, 0)
            await others.wait(Restarted, count + 1)
        with trio.fail_after(HANG_SECONDS), pytest.raises(ProcDied) as caught:
            await ledgers.slice(gpus=1).bump.call_one()
        assert trimesh.origin(caught.value).point == {"gpus": 1}
        assert not caught.value.maybe_executed
        assert len(ledgers.alive()) == 1


# ---- members that are tied to each other ----------------------------------------------------------------------------


async def test_ranks_outside_of_a_collective_go_on(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """X4, C2: ranks that wait for a failed one, where no cancel reaches them, are silent; `exclude` gives the rest."""
    if not backend.is_sim:
        monkeypatch.setattr("trimesh.limits.CANCEL_ACK_SECONDS", 0.2)
    async with backend.procs({"gpus": 4}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        probes = await procs.spawn("probes", Probe)
        tied = probes.slice(gpus=slice(0, 3))
        joined = attempt(nursery, tied.fail_at_gate.call, ValueError("left the others"), [0])
        await tied.wait.call("at the gate")
        await probes.slice(gpus=0).open_gate.call_one()
        with pytest.raises(MeshErrorGroup) as caught:
            await joined.result()
        assert kinds(caught.value) == [ValueError, Unresponsive, Unresponsive]

        healthy = probes.exclude(trimesh.coords(caught.value))
        assert [*(await healthy.rank.call()).values()] == [3]
        await tied.open_gate.call()


async def test_ranks_of_a_collective_are_made_anew_together(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """X4, R02: with `one_for_all` the silence of one rank is the end of all, also of those that sit with it."""
    if not backend.is_sim:
        monkeypatch.setattr("trimesh.limits.CANCEL_ACK_SECONDS", 0.2)
    policy = restart("one_for_all", on=(Unresponsive,))
    async with backend.procs({"gpus": 3}, supervision=policy, grace=0.1) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            joined = attempt(nursery, probes.fail_at_gate.call, ValueError("left the others"), [0])
            await probes.wait.call("at the gate")
            await probes.slice(gpus=0).open_gate.call_one()
            with pytest.raises(MeshErrorGroup) as caught:
                await joined.result()
        assert ValueError in kinds(caught.value)
        await log.wait(Restarted, 3)
        assert sorted(log.ranks(Restarted)) == [0, 1, 2]
        assert [*(await probes.seen.call()).values()] == [[], [], []]
        await procs.stop(grace=HANG_SECONDS)  # on a busy machine no process ends within that of the mesh


@only_sim
async def test_handle_elsewhere_names_a_member_that_ended_long_ago(
    backend: SimBackend, monkeypatch: pytest.MonkeyPatch
):
    """A process that has forgotten a death asks again, and waits for nothing."""
    monkeypatch.setattr(limits, "GONE_PEERS", 2)
    monkeypatch.setattr(limits, "DEATHS", 1)
    async with (
        backend.procs({"gpus": 5}, supervision=Isolate(), name="first") as first,
        backend.procs({"gpus": 1}, name="second") as second,
        reading(first) as log,
    ):
        ledgers = await first.spawn("ledgers", Ledger)
        away = await second.spawn("away", Far, ledgers)
        assert await away.ask.call_one([0, 1, 2, 3, 4]) == []
        for rank in (1, 2, 3, 4):
            await kill_and_see(backend, first, log, rank)
        assert await away.ask.call_one([0, 1, 2, 3, 4]) == ["ProcDied"] * 4


class Far(Probe):
    """Calls members through a handle."""

    def __init__(self, ledgers: Any) -> None:
        super().__init__()
        self.ledgers = ledgers

    @endpoint
    async def ask(self, ranks: Any) -> Any:
        """Return the names of the errors of those that did not answer within 10 s."""
        names: list[str] = []
        for rank in ranks:
            try:
                with trio.fail_after(10):
                    await self.ledgers.slice(gpus=rank).bump.call_one()
            except (ProcDied, MeshStopped, trio.TooSlowError) as error:
                names.append(type(error).__name__)
        return names
