"""Each fault of the vocabulary happens, as its description says, in simulated processes (S1)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import trio
from tests.testing.actors import Relay, Worker, is_exact, run_body

import trimesh
from trimesh import LinkLost, MeshErrorGroup, ProcDied, ShapeError, SpawnError, limits, this_host
from trimesh.testing import UnfiredFault, simulate

SEEDS = 20


def only(error: BaseException) -> Any:
    (leaf,) = trimesh.leaves(error)
    return leaf


# ---- endpoints -------------------------------------------------------------------------------------------------------


@simulate(seeds=SEEDS)
async def test_raises_at_the_planned_start_only(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    faults.at(w.step, {"gpus": 1}, nth=2, times=2).raises(KeyError("planned"))

    outcomes = [[o.ok for o in (await w.step.call_settled(i)).values()] for i in range(4)]

    assert outcomes == [[True, True], [True, False], [True, False], [True, True]]
    assert [(fired.site, fired.where) for fired in fault_log] == [("dispatch", "w[gpus=1]")] * 2


@simulate(seeds=SEEDS)
async def test_delays_the_planned_start(mesh, faults):
    w = await mesh.spawn("w", Worker)
    faults.at(w.inline, {"gpus": 0}).delays(50)
    start = trio.current_time()

    assert list((await w.inline.call()).values()) == [8, 8]

    assert 50 <= trio.current_time() - start < 52


@simulate(seeds=SEEDS)
async def test_a_view_names_its_members(mesh, faults):
    w = await mesh.spawn("w", Worker)
    faults.at(w.slice(gpus=1).step).raises(KeyError)

    with pytest.RaisesGroup(KeyError) as caught:
        await w.step.call()

    assert trimesh.coords(caught.value) == [{"gpus": 1}]


@pytest.mark.parametrize(("what", "steps"), [("request", 0), ("in_flight", 0), ("reply", 1)])
@simulate(seeds=SEEDS)
async def test_lost_frame_is_a_lost_link(mesh, faults, what, steps):
    """The caller gets `ProcDied`; whether the endpoint ran depends on what was lost."""
    del mesh
    ran: list[int] = []
    Noting.ran = ran
    async with this_host().spawn_procs({}, name="other") as others:
        relay = await others.spawn("relay", Relay)
        del relay
        with pytest.RaisesGroup(ProcDied) as caught:
            async with this_host().spawn_procs({"gpus": 2}, name="victims") as procs:
                w = await procs.spawn("w", Noting)
                faults.call(w.note, {"gpus": 1}).lose(what, nth=2)
                await w.note.call()
                await w.note.call()

    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert only(caught.value).reason == "killed"
    assert ran.count(1) == 1 + steps


class Noting(Worker):
    """Notes in the memory of the test which ranks have run to the end."""

    ran: list[int]

    @trimesh.endpoint
    async def note(self) -> None:
        await trio.sleep(0.5)
        self.ran.append(trimesh.current_rank())


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sigkill", {"signal": signal.SIGKILL, "oom_killed": False}),
        ("sigterm", {"signal": signal.SIGTERM}),
        ("sigsegv", {"signal": signal.SIGSEGV}),
        ("abort", {"signal": signal.SIGABRT}),
        ("oom", {"signal": signal.SIGKILL, "oom_killed": True}),
        ("exit(3)", {"signal": None, "exit_code": 3}),
        ("sigstop", {"reason": "stopped"}),
    ],
)
@simulate(seeds=5)
async def test_killed_process_is_diagnosed(faults, how, expected):
    with pytest.RaisesGroup(ProcDied) as caught:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            w = await procs.spawn("w", Worker)
            faults.kill(procs.slice(gpus=1), how=how)
            await w.slow.call(100)

    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert {name: getattr(only(caught.value), name) for name in expected} == expected


@simulate(seeds=SEEDS)
async def test_stopped_process_that_goes_on_in_time_is_not_given_up(mesh, faults):
    w = await mesh.spawn("w", Worker)
    resume = faults.kill({"gpus": 1}, how="sigstop")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.step.call)
        await trio.sleep(limits.LEASE_SECONDS - 0.1)
        assert nursery.child_tasks
        resume()


@pytest.mark.parametrize("fault", ["gil", "loop"])
@simulate(seeds=5)
async def test_stuck_process_is_late_and_keeps_its_lease(mesh, faults, fault):
    w = await mesh.spawn("w", Worker)
    seconds = 3 * limits.LEASE_SECONDS
    if fault == "gil":
        faults.kill({"gpus": 0}, how=f"hold_gil({seconds:g})")
    else:
        faults.loop({"gpus": 0}).lag(seconds)
    start = trio.current_time()

    await w.step.call()

    assert seconds <= trio.current_time() - start < seconds + 1


@pytest.mark.parametrize("stage", ["launch", "handshake"])
@simulate(seeds=SEEDS)
async def test_planned_start_fails_and_leaves_nothing(faults, stage):
    faults.spawn(nth=2).fails(stage)
    kind = SpawnError if stage == "launch" else ProcDied

    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 3}):
            raise AssertionError("it must not start")

    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {kind}


# ---- links -----------------------------------------------------------------------------------------------------------


@simulate(seeds=SEEDS)
async def test_partition_delays_what_is_sent_until_it_is_healed(mesh, faults):
    w = await mesh.spawn("w", Worker)
    start = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.step.call)
        async with faults.partition("controller", {"gpus": 1}):
            await trio.sleep(2)

    assert 2 <= trio.current_time() - start < 3


@pytest.mark.parametrize(("direction", "dies"), [("both", True), ("b_to_a", True), ("a_to_b", False)])
@simulate(seeds=5)
async def test_long_partition_ends_the_lease_of_who_is_not_heard(faults, direction, dies):
    """Only the owner holds a lease (O5): what it says may be lost for any time, what it hears may not."""

    async def block() -> None:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            w = await procs.spawn("w", Worker)
            async with faults.partition("controller", procs.slice(gpus=1), direction):
                await trio.sleep(2 * limits.LEASE_SECONDS)
            await w.step.call()

    if dies:
        with pytest.RaisesGroup(ProcDied) as caught:
            await block()
        assert only(caught.value).reason == "stopped"
    else:
        await block()


@pytest.mark.parametrize(("fault", "kind"), [("drop", ProcDied), ("corrupt", ProcDied)])
@simulate(seeds=SEEDS)
async def test_hit_link_ends(faults, fault, kind):
    """A lost message is a lost link; a damaged one breaks the protocol, which ends the link, too."""
    with pytest.RaisesGroup(kind):
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            w = await procs.spawn("w", Worker)
            getattr(faults.link("controller", procs.slice(gpus=0)), fault)()
            await w.slow.call(100)


@simulate(seeds=SEEDS)
async def test_protocol_breach_seen_by_the_owner_is_told_once(faults):
    """X3: the block tells of the lost link, and neither the call in flight nor the stop of the actors does so again."""
    with pytest.RaisesGroup(LinkLost):
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            w = await procs.spawn("w", Worker)
            faults.link(procs.slice(gpus=0), "controller", direction="a_to_b").corrupt()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.slow.call, 100)
                await trio.sleep(1)
                await w.step.call()  # waits behind the slow one; its answer would be the one that is damaged
                raise AssertionError("the block must have failed")


@simulate(seeds=SEEDS)
async def test_delay_and_bandwidth_take_their_time(mesh, faults):
    w = await mesh.spawn("w", Worker)
    faults.link("controller", mesh).delay(1.0)
    start = trio.current_time()

    await w.step.call()
    assert 2.0 <= trio.current_time() - start < 2.2

    faults.heal()
    faults.link("controller", mesh).bandwidth(1_000)
    start = trio.current_time()
    await w.step.call()
    assert 0.05 < trio.current_time() - start < 2.0


@simulate(seeds=SEEDS)
async def test_reset_ends_the_link_after_so_many_bytes(faults):
    with pytest.RaisesGroup(ProcDied):
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            w = await procs.spawn("w", Worker)
            faults.link("controller", procs.slice(gpus=0)).reset_after(500)
            for number in range(100):
                await w.step.call(number)
            raise AssertionError("the link must have ended")


@simulate(seeds=SEEDS)
async def test_link_between_workers_is_disturbed_alone(mesh, faults):
    """A lost link between two workers that live is the loss of the peer to the caller there."""
    w = await mesh.spawn("w", Worker)
    relay = await mesh.slice(gpus=0).spawn("relay", Relay)
    assert await relay.pass_on.call_one(w.slice(gpus=slice(1, 2)), 5) == 5
    faults.link({"gpus": 0}, {"gpus": 1}).drop()

    with pytest.RaisesGroup(ProcDied):
        await relay.pass_on.call_one(w.slice(gpus=slice(1, 2)), 5)

    assert list((await w.step.call(3)).values()) == [3, 3]


# ---- clocks and the operating system ---------------------------------------------------------------------------------


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=10, per_host={"gpus": 4})
async def test_wall_clocks_of_a_skewed_mesh_differ(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    before = list((await w.wall_clock.call()).values())

    faults.clock(mesh).skew(1_000.0)

    after = list((await w.wall_clock.call()).values())
    wrong = [late - early for early, late in zip(before, after, strict=True)]
    assert len({round(one) for one in wrong}) > 1
    assert all(abs(one) < 1_060 for one in wrong)
    assert [fired.site for fired in fault_log] == ["clock"]


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=10, per_host={"gpus": 2})
async def test_calls_to_a_slow_processor_queue_for_it(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    await w.step.call(0)
    quicken = faults.processor({"gpus": 1}).slow(0.5)
    start = trio.current_time()

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(w.slice(gpus=1).step.call_one, number)
        await w.slice(gpus=0).step.call_one(0)
        if is_exact():
            assert trio.current_time() - start < 0.5

    assert trio.current_time() - start >= 1.5
    if is_exact():
        assert trio.current_time() - start < 2
    assert [fired.site for fired in fault_log] == ["processor"]

    quicken()
    again = trio.current_time()
    await w.step.call(0)
    if is_exact():
        assert trio.current_time() - again < 0.5


@simulate(seeds=5)
async def test_wall_clock_of_an_actor_is_virtual_and_jumps(mesh, faults):
    w = await mesh.spawn("w", Worker)
    before = list((await w.wall_clock.call()).values())
    faults.clock({"gpus": 1}).jump(30.0)
    await trio.sleep(5)

    after = list((await w.wall_clock.call()).values())

    assert 5 <= after[0] - before[0] < 6
    assert 35 <= after[1] - before[1] < 36


@simulate(seeds=5)
async def test_clock_that_runs_fast_ends_a_budget_early(mesh, faults):
    """D02: budgets are relative, so a jump changes nothing, and only a wrong rate does."""
    w = await mesh.spawn("w", Worker)
    faults.clock(mesh).jump(1_000.0)
    with trio.fail_after(10):
        await w.slow.call(8)
    faults.clock({"gpus": 0}).drift(1.0)

    with pytest.RaisesGroup(trimesh.RemoteCancelled), trio.fail_after(10):
        await w.slow.call(8)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=5)
async def test_slow_clock_is_healed(mesh, faults):
    """S3: healed twice, as once."""
    w = await mesh.slice(gpus=0).spawn("w", Worker)

    async def rate() -> float:
        """Return how fast the clock there runs, at least; a late answer makes it too small."""
        start, before = trio.current_time(), await w.wall_clock.call_one()
        await trio.sleep(3.0 if is_exact() else 0.3)
        return (await w.wall_clock.call_one() - before) / (trio.current_time() - start)

    heal = faults.clock({"gpus": 0}).drift(-0.9)
    assert await rate() < 0.15

    heal()
    heal()

    assert await rate() > (0.8 if is_exact() else 0.15)


@pytest.mark.parametrize("name", ["getppid", "kill", "_exit"])
@simulate(seeds=2)
async def test_actor_may_not_touch_its_process(mesh, name):
    """S1."""
    w = await mesh.spawn("w", Worker)

    with pytest.raises(RuntimeError, match=r"faults\.kill|trimesh\.context"):
        await w.slice(gpus=0).call_os.call_one(name)


@simulate(seeds=SEEDS)
async def test_threaded_endpoint_runs_inline(mesh):
    """S1."""
    w = await mesh.spawn("w", Worker)

    assert list((await w.in_thread.call()).values()) == [7, 7]


@simulate(seeds=SEEDS)
async def test_late_threaded_endpoint_runs_inline(mesh, faults):
    """S1: in a thread of its own the virtual clock would run on without it."""
    w = await mesh.spawn("w", Worker)
    faults.at(w.in_thread, {"gpus": 0}).delays(1.0)
    faults.at(w.in_thread, {"gpus": 1}).delays(2.0)
    start = trio.current_time()

    assert list((await w.in_thread.call()).values()) == [7, 7]
    assert 2.0 <= trio.current_time() - start < 2.5


# ---- planning --------------------------------------------------------------------------------------------------------


@simulate(seeds=1)
async def test_wrong_plans_are_refused_when_they_are_made(mesh, faults):
    """S1."""
    w = await mesh.spawn("w", Worker)

    with pytest.raises(ShapeError):
        faults.at(w.step, {"gpus": 2})
    with pytest.raises(ShapeError):
        faults.kill({"tpus": 0})
    with pytest.raises(AttributeError, match="no endpoint 'stepp'"):
        faults.at(w.stepp)
    with pytest.raises(TypeError, match="needs an endpoint of a mesh"):
        faults.at(Worker.step)
    with pytest.raises(ValueError, match="sigkill"):
        faults.kill({"gpus": 0}, how="politely")
    with pytest.raises(ValueError, match="must be a whole number from 1"):
        faults.at(w.step, nth=0)
    with pytest.raises(ValueError, match="at most 1"):
        faults.link("controller", mesh).drop(1.5)
    with pytest.raises(ValueError, match="request"):
        faults.call(w.step).lose("everything")
    with pytest.raises(TypeError, match="members are named"):
        faults.kill("everybody")


def test_fault_that_never_fires_fails_the_run():
    """S1."""

    async def body(mesh, faults):
        w = await mesh.spawn("w", Worker)
        faults.at(w.step, nth=3).raises(KeyError)
        await w.step.call()

    outcome = run_body(body)

    assert isinstance(outcome.error, UnfiredFault)
    assert "at w[2].step nth=3: raises(KeyError)" in str(outcome.error)
