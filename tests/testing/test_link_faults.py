"""Faults of links, starts, clocks and resources: one body over simulated and real processes (S1)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio
from tests.conformance.publishing import Publisher, Reader
from tests.patience import HANG_SECONDS
from tests.testing.actors import Worker, is_exact

import trimesh
from trimesh import Actor, LinkLost, MeshErrorGroup, ProcDied, SpawnError, endpoint, limits, this_host
from trimesh.testing import UnfiredFault, simulate
from trimesh.testing.real.run import RealSeed, run_real
from trimesh.testing.simulated.seeded_run import SeededOptions

both = pytest.mark.mesh_backend("sim", "proc")


class Relay(Actor):
    """Calls others, over links between workers."""

    @endpoint
    async def pass_on(self, other: Any, number: int) -> int:
        return await other.step.call_one(number)


class Keeper(Actor):
    """Takes and gives large bodies."""

    @endpoint
    async def mirror(self, data: bytearray) -> bytearray:
        return data


# ---- time ------------------------------------------------------------------------------------------------------------


@both
@simulate(seeds=5)
async def test_delay_is_added_to_each_direction(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    faults.link("controller", mesh).delay(0.2)
    start = trio.current_time()

    assert list((await w.step.call(4)).values()) == [4, 4]

    assert trio.current_time() - start >= 0.4
    assert {fired.site for fired in fault_log} == {"link"}
    faults.heal()
    late = len(fault_log)
    start = trio.current_time()
    await w.step.call(5)
    assert len(fault_log) == late
    if is_exact():
        assert trio.current_time() - start < 0.2


@both
@simulate(seeds=5)
async def test_delay_of_one_direction_spares_the_other(mesh, faults):
    w = await mesh.spawn("w", Worker)
    faults.link("controller", {"gpus": 0}, direction="b_to_a").delay(0.3)
    start = trio.current_time()
    await w.slice(gpus=1).step.call()
    if is_exact():
        assert trio.current_time() - start < 0.3

    await w.step.call()

    assert trio.current_time() - start >= 0.3
    if is_exact():
        assert trio.current_time() - start < 0.6


@both
@simulate(seeds=5)
async def test_bandwidth_takes_its_time(mesh, faults):
    keeper = await mesh.slice(gpus=slice(0, 1)).spawn("keeper", Keeper)
    faults.link("controller", mesh).bandwidth(1_000_000)
    start = trio.current_time()

    assert await keeper.mirror.call_one(bytearray(200_000)) == bytearray(200_000)

    assert trio.current_time() - start >= 0.4  # there and back


@both
@simulate(seeds=10)
async def test_reordered_messages_keep_the_order_of_their_sender(mesh, faults):
    """S01: lanes and links overtake each other, the calls of one process to one actor do not."""
    w = await mesh.spawn("w", Worker)
    faults.link("controller", mesh).reorder(0.02)
    got: list[list[int]] = []
    async with trio.open_nursery() as nursery:

        async def call(number: int) -> None:
            got.append(list((await w.step.call(number)).values()))

        for number in range(10):
            nursery.start_soon(call, number)

    assert sorted(got) == [[number, number] for number in range(10)]
    assert list((await w.count.call()).values()) == [10, 10]


@both
@simulate(seeds=10)
async def test_repeated_messages_are_taken_once(mesh, faults, fault_log):
    """S02: in one frame, in fragments or in a segment; what comes again has no effect."""
    w = await mesh.spawn("w", Worker)
    keeper = await mesh.slice(gpus=slice(0, 1)).spawn("keeper", Keeper)
    faults.link("controller", mesh).duplicate()

    for number in range(5):
        assert list((await w.step.call(number)).values()) == [number, number]
    for size in (50_000, 100_000, 1_000_000):
        assert await keeper.mirror.call_one(bytearray(b"x" * size)) == bytearray(b"x" * size)
    async with w.items.stream(3) as results:
        assert sorted([item async for _, item in results]) == [0, 0, 1, 1, 2, 2]

    assert list((await w.count.call()).values()) == [5, 5]
    assert {fired.site for fired in fault_log} == {"link"}


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop", "corrupt"])
@both
@simulate(seeds=5)
async def test_hit_link_ends(faults, fault_log, fault):
    """A lost message is a lost link; a damaged one breaks the protocol, which ends the link, too."""
    with pytest.RaisesGroup(ProcDied) as caught:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            getattr(faults.link("controller", procs.slice(gpus=1), direction="a_to_b"), fault)()
            await w.slow.call(100)

    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert fault_log


@both
@simulate(seeds=5)
async def test_breach_seen_by_the_owner_is_a_lost_link(faults):
    """The peer's bytes never do more than end the link (`ProtocolError` inside, `LinkLost` at the block)."""
    with pytest.RaisesGroup(LinkLost) as caught:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            faults.link(procs.slice(gpus=0), "controller", direction="a_to_b").corrupt()
            await w.step.call(1)

    assert trimesh.coords(caught.value) == [{"gpus": 0}]


@both
@simulate(seeds=5)
async def test_reset_ends_the_link_after_so_many_bytes(faults):
    with pytest.RaisesGroup(ProcDied):
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            faults.link("controller", procs.slice(gpus=0)).reset_after(2_000)
            for number in range(1_000):
                await w.step.call(number)
            raise AssertionError("the link must have ended")


@both
@simulate(seeds=5)
async def test_link_between_workers_is_disturbed_alone(mesh, faults):
    """A lost link between two workers that live is the loss of the peer to the caller there."""
    w = await mesh.spawn("w", Worker)
    relay = await mesh.slice(gpus=0).spawn("relay", Relay)
    assert await relay.pass_on.call_one(w.slice(gpus=slice(1, 2)), 5) == 5
    faults.link({"gpus": 0}, {"gpus": 1}).drop()

    with pytest.raises(ProcDied):
        await relay.pass_on.call_one(w.slice(gpus=slice(1, 2)), 5)

    assert list((await w.step.call(3)).values()) == [3, 3]


# ---- partitions ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("long_lease")
@both
@simulate(seeds=5)
async def test_call_waits_out_a_short_partition(mesh, faults):
    w = await mesh.spawn("w", Worker)
    start = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.step.call, 1)
        async with faults.partition("controller", {"gpus": 1}):
            await trio.sleep(1)
            assert nursery.child_tasks

    assert trio.current_time() - start >= 1
    if is_exact():
        assert trio.current_time() - start < 2


@both
@simulate(seeds=5)
async def test_partition_between_workers_is_healed_though_nothing_passes(mesh, faults):
    w = await mesh.spawn("w", Worker)
    relay = await mesh.slice(gpus=0).spawn("relay", Relay)
    other = w.slice(gpus=slice(1, 2))
    cut = faults.partition(mesh.slice(gpus=0), mesh.slice(gpus=1))  # before there is a link
    async with trio.open_nursery() as nursery, cut:
        nursery.start_soon(relay.pass_on.call_one, other, 5)
        await w.step.call(1)
        await trio.sleep(0.5)
        assert nursery.child_tasks


@pytest.mark.parametrize(("direction", "dies"), [("both", True), ("b_to_a", True), ("a_to_b", False)])
@both
@simulate(seeds=3)
async def test_long_partition_ends_the_lease_of_who_is_not_heard(faults, direction, dies):
    """O5: only the owner holds a lease: what it says may be lost for any time, what it hears may not."""

    async def block() -> None:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            async with faults.partition("controller", procs.slice(gpus=1), direction):
                # A lease counts the beats of its thread, so that it ends late beside load: the death ends this.
                await trio.sleep(HANG_SECONDS if dies else limits.LEASE_SECONDS + 3 * limits.BEAT_SECONDS)
            await w.step.call()

    if not dies:
        await block()
        return
    with pytest.RaisesGroup(ProcDied) as caught:
        await block()
    (error,) = trimesh.leaves(caught.value)
    assert error.reason == "stopped"
    assert trimesh.coords(caught.value) == [{"gpus": 1}]


# ---- starts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kind"), [("launch", SpawnError), ("handshake", ProcDied)])
@both
@simulate(seeds=5)
async def test_planned_start_fails_and_leaves_nothing(faults, fault_log, stage, kind):
    """E11: the rank that failed is named, and the others are reaped."""
    faults.spawn(nth=2).fails(stage)

    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 3}):
            raise AssertionError("it must not start")

    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {kind}
    assert len(trimesh.coords(caught.value)) == 1
    assert fault_log[0].site == "spawn"
    async with this_host().spawn_procs({"gpus": 2}) as procs:  # the next ones start
        await (await procs.spawn("w", Worker)).step.call()


@both
@simulate(seeds=5)
async def test_restart_that_fails_counts(faults):
    """R05: a restarted process that ends before its first word is restarted once more."""
    restart = trimesh.Restart("one_for_one", intensity=5, period=60)
    async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed(), supervision=restart) as procs:
        w = await procs.spawn("w", Worker)
        faults.spawn(nth=1).fails("handshake")
        faults.kill(procs.slice(gpus=1))
        await w.step.call_settled()
        assert list((await w.step.call(3)).values()) == [3, 3]


# ---- clocks ----------------------------------------------------------------------------------------------------------


@both
@simulate(seeds=3)
async def test_budget_follows_the_rate_of_the_clock_over_there_and_not_its_jumps(mesh, faults):
    """D02: budgets are relative, so a jump changes nothing, and only a wrong rate does."""
    w = await mesh.spawn("w", Worker)
    wall = w.slice(gpus=slice(0, 1)).wall_clock
    before = await wall.call_one()
    faults.clock({"gpus": 0}).jump(1_000_000)
    assert 999_999 < await wall.call_one() - before < 1_000_100
    with trio.fail_after(HANG_SECONDS):
        await w.slow.call(0.1)

    seconds = 2 if is_exact() else 20
    faults.clock({"gpus": 0}).drift(3.0 if is_exact() else 39.0)  # four seconds there are one here, or forty
    start = trio.current_time()
    with (
        pytest.RaisesGroup(trimesh.RemoteCancelled),
        trio.fail_after(seconds),
    ):  # over there it is over in half a second
        await w.slice(gpus=0).slow.call(600)

    assert trio.current_time() - start > 0.4
    if is_exact():
        assert trio.current_time() - start < 1.5


@pytest.mark.mesh_backend("proc")
async def test_clock_of_the_test_itself_is_true_again_afterwards(mesh, faults):
    before = time.time()
    faults.clock("controller").jump(1e6)
    assert time.time() - before >= 1e6
    faults.clock({"gpus": 1}).drift(9.0)
    w = await mesh.spawn("w", Worker)
    there = await w.slice(gpus=1).wall_clock.call_one()
    here = trio.current_time()
    await trio.sleep(0.2)
    seconds = trio.current_time() - here
    assert await w.slice(gpus=1).wall_clock.call_one() - there > 9 * seconds


def test_true_time_is_back():
    assert time.time() - 1e6 < time.clock_gettime(time.CLOCK_REALTIME)


# ---- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["ENOSPC", "EMFILE"])
@both
@simulate(seeds=5)
async def test_start_without_resources_fails_and_the_next_succeeds(faults, fault_log, error):
    faults.resources("controller").fails(error)

    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 2}):
            raise AssertionError("it must not start")

    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, SpawnError)
    assert {"ENOSPC": "No space left", "EMFILE": "Too many open files"}[error] in str(leaf)
    assert fault_log[0].site == "resources"
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await (await procs.spawn("w", Worker)).step.call()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.mesh_backend("proc")
@simulate()
async def test_start_without_any_of_its_descriptors_leaves_nothing(faults, nth):
    """The ring, the pidfd, what the new process passes: whichever is refused, it is said and the process is reaped."""
    faults.resources("controller").fails("EMFILE", nth=nth)

    with pytest.raises(MeshErrorGroup, match=r"procs") as caught:
        async with this_host().spawn_procs({}):
            raise AssertionError("it must not start")

    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, SpawnError | LinkLost)
    assert "Too many open files" in str(leaf) or "no descriptor left" in str(leaf)
    async with this_host().spawn_procs({}) as procs:
        await (await procs.spawn("w", Worker)).step.call()


@both
@simulate(seeds=5)
async def test_link_without_resources_fails_the_call_and_the_next_makes_it(mesh, faults):
    """The peer lives, so it is not given up: only the call that wanted a link to it fails."""
    w = await mesh.spawn("w", Worker)
    relay = await mesh.slice(gpus=0).spawn("relay", Relay)
    other = w.slice(gpus=slice(1, 2))
    faults.resources({"gpus": 0}).fails("EMFILE", times=2)

    for _ in range(2):
        with pytest.raises(LinkLost, match="Too many open files") as caught:
            await relay.pass_on.call_one(other, 5)
    origin = trimesh.origin(caught.value)
    assert origin is not None
    assert origin.point == {"gpus": 1}
    await trio.sleep(0.9 * limits.EXIT_REPORT_SECONDS)
    assert await relay.pass_on.call_one(other, 5) == 5
    await trio.sleep(0.3 * limits.EXIT_REPORT_SECONDS)  # by then the peer has given up waiting for news of our death
    assert await relay.pass_on.call_one(other, 5) == 5


@simulate(seeds=2)
async def test_reader_without_resources_for_a_link_goes_on_when_it_has_some(mesh, faults, fault_log):
    """The publisher lives, so it is not given up."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    faults.resources({"gpus": 1}).fails("EMFILE", times=3)

    assert await reader.follow.call_one(handle, 1) == [1]
    await trio.sleep(3 * limits.EXIT_REPORT_SECONDS)
    await publisher.publish.call_one(2)
    assert await reader.follow.call_one(handle, 2) == [2]
    assert len(fault_log) == 3


@pytest.mark.mesh_backend("proc")
@simulate()
async def test_large_body_without_a_segment_travels_in_frames(mesh, faults, fault_log):
    """Nothing is lost for want of shared memory, and later bodies travel in segments again."""
    keeper = await mesh.slice(gpus=slice(0, 1)).spawn("keeper", Keeper)
    data = bytearray(range(256)) * 2_000
    faults.resources("controller").fails("ENOSPC", times=3)
    faults.resources({"gpus": 0}).fails("EMFILE", times=3)

    for _ in range(3):
        assert await keeper.mirror.call_one(data) == data

    assert {fired.where for fired in fault_log} == {"controller", "procs[gpus=0]"}


# ---- chaos -----------------------------------------------------------------------------------------------------------


@both
@simulate(seeds=5)
async def test_calls_go_on_while_links_are_slow_by_chance(mesh, chaos, fault_log):
    w = await mesh.spawn("w", Worker)
    plan = chaos.plan(delay=1.0, every=(0.05, 0.2), max_down=2)
    async with chaos.safety(plan, duration=20):
        while len(fault_log) < 5:
            assert list((await w.step.call(1)).values()) == [1, 1]
            await trio.sleep(0.02)
    async with chaos.liveness(within=10):
        await w.step.call()


# ---- what is planned must happen ------------------------------------------------------------------------------------


@pytest.mark.real
def test_link_fault_of_real_processes_must_fire():
    async def body(mesh: Any, faults: Any) -> None:
        await mesh.spawn("w", Worker)
        faults.link({"gpus": 0}, {"gpus": 1}).delay(0.1)

    with pytest.raises(UnfiredFault, match="delay"):
        run_real(body, {"mesh": None, "faults": None}, SeededOptions({"gpus": 2}), [RealSeed()])
