"""Transfers of buffers that fail or are late, processes that end or stop meanwhile; simulated and real (S1, N4)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import trio
from tests.conformance.meshes import attempt
from tests.conformance.publishing import (
    FIRST_TRANSFERS,
    READING_TRANSFERS,
    Publisher,
    Reader,
    steps_of,
    version_of,
)
from tests.conformance.publishing import (
    LARGE as LARGE_VERSION,
)
from tests.conformance.publishing import (
    SMALL as SMALL_VERSION,
)
from tests.conformance.vault import LARGE, SMALL, Vault, pattern
from tests.conformance.vault import Reader as Peeker
from tests.patience import HANG_SECONDS
from tests.testing.actors import run_body

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, ProcDied, endpoint, limits
from trimesh.rdma import Published
from trimesh.testing import UnfiredFault, UnsupportedFault, simulate
from trimesh.testing.plans.system_faults import TransferFault
from trimesh.testing.real.run import RealSeed, run_real
from trimesh.testing.simulated.seeded_run import SeededOptions, run_once

both = pytest.mark.mesh_backend("sim", "proc")


class Shelf(Actor):
    """Publishes what it is given."""

    @endpoint
    async def publish(self, tensors: dict[str, bytes]) -> Any:
        published = Published()
        await published.publish(tensors)
        return published


class Planned(Exception):
    """An exception of the test itself; it goes by value where it must."""


# ---- the fault -------------------------------------------------------------------------------------------------------


@both
@simulate(seeds=10)
async def test_planned_transfer_raises_at_who_makes_it(mesh, faults, fault_log):
    """S1: the nth one of each process is not made; those before and after are."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    peeker = await mesh.slice(gpus=1).spawn("peeker", Peeker)
    handle = await vault.handle.call_one()
    faults.transfer({"gpus": 1}, nth=2).raises(Planned("planned"))

    assert await peeker.read.call_one(handle) == pattern(SMALL)
    with pytest.raises(Planned, match="planned"):
        await peeker.write.call_one(handle, bytes(SMALL))
    assert await peeker.read.call_one(handle) == pattern(SMALL)

    assert [(fired.site, fired.where) for fired in fault_log] == [("transfer", "procs[gpus=1]")]


@both
@simulate(seeds=10)
async def test_transfers_of_the_test_itself_fail_too(mesh, faults, fault_log):
    """S1: "controller"; the same fault counts for each process by itself."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault, SMALL, 1)
    handle = await vault.handle.call_one()
    faults.transfer("controller", times=2).raises(OSError)

    for _ in range(2):
        with pytest.raises(OSError):  # noqa: PT011 - it says nothing
            await handle.fetch_add(1)
    assert await handle.compare_and_swap(0, 1) == int.from_bytes(pattern(8, 1), "little")

    assert [(fired.site, fired.where) for fired in fault_log] == [("transfer", "controller")] * 2


@both
@simulate(seeds=10)
async def test_late_transfer_can_be_cancelled(mesh, faults):
    """S1: nothing is written to the destination."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    handle = await vault.handle.call_one()
    faults.transfer("controller").delays(600)
    found = bytearray(SMALL)
    start = trio.current_time()

    with trio.move_on_after(0.1) as scope:
        await handle.read_into(found)

    assert scope.cancelled_caught
    assert trio.current_time() - start < 300
    assert found == bytes(SMALL)


@simulate(seeds=10)
async def test_transfer_is_as_late_as_planned(mesh, faults):
    """S1: faults of one transfer add up, and one that raises does so at its end."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    handle = await vault.handle.call_one()
    faults.transfer("controller").delays(20)
    faults.transfer("controller").delays(30)
    faults.transfer("controller").raises(Planned)
    start = trio.current_time()

    with pytest.raises(Planned):
        await handle.read_into(bytearray(SMALL))

    assert trio.current_time() - start == pytest.approx(50)


@simulate(seeds=2)
async def test_fault_outlives_its_process(faults):
    """S1: a place keeps its faults, and their counts, whoever is there."""
    policy = trimesh.Restart("one_for_one", on=(ProcDied,))
    async with trimesh.this_host().spawn_procs({"gpus": 2}, supervision=policy) as procs:
        vault = await procs.slice(gpus=0).spawn("vault", Vault)
        peeker = await procs.slice(gpus=1).spawn("peeker", Peeker)
        handle = await vault.handle.call_one()
        faults.transfer(procs.slice(gpus=1), nth=2).raises(Planned)
        await peeker.read.call_one(handle)
        async with procs.events() as events:
            faults.kill(procs.slice(gpus=1))
            async for event in events:
                if isinstance(event, trimesh.Restarted):
                    break
        with pytest.raises(Planned):
            await peeker.read.call_one(handle)


@both
@simulate(seeds=1)
async def test_wrong_plans_of_transfers_are_refused(mesh, faults):
    """S1."""
    with pytest.raises(trimesh.ShapeError):
        faults.transfer({"gpus": 2})
    with pytest.raises(TypeError, match="members are named"):
        faults.transfer("everybody")
    with pytest.raises(ValueError, match="nth must be a whole number from 1"):
        faults.transfer(mesh, nth=0)
    with pytest.raises(ValueError, match="times must be a whole number from 1"):
        faults.transfer(mesh, times=0)
    with pytest.raises(ValueError, match="seconds"):
        faults.transfer(mesh).delays(0)


@pytest.mark.mesh_backend("proc")
async def test_unarmed_process_makes_its_transfers(faults):
    """S1."""
    async with trimesh.this_host().spawn_procs({}, name="unarmed") as procs:
        with pytest.raises(UnsupportedFault, match=r"faults\.armed"):
            faults.transfer(procs).raises(OSError)
    assert not faults.executor.plan.planned


async def _one_transfer(mesh: Any, faults: Any) -> None:
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    handle = await vault.handle.call_one()
    faults.transfer({"gpus": 1}, nth=1).raises(OSError)
    faults.transfer("controller", nth=2).delays(1)
    await handle.read_into(bytearray(SMALL))


def test_planned_transfer_must_be_made():
    outcome = run_body(_one_transfer)

    assert isinstance(outcome.error, UnfiredFault)
    assert r"transfer procs[gpus=1] nth=1: raises(OSError)" in str(outcome.error)
    assert r"transfer controller nth=2: delays(1)" in str(outcome.error)


@pytest.mark.real
def test_planned_transfer_of_a_real_process_must_be_made():
    with pytest.raises(UnfiredFault, match=r"gpus=1.*controller nth=2"):
        run_real(_one_transfer, {"mesh": None, "faults": None}, SeededOptions({"gpus": 2}), [RealSeed()])


async def _one_that_matters(mesh: Any, faults: Any) -> None:
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    handle = await vault.handle.call_one()
    faults.transfer("controller", nth=1).delays(1)
    faults.transfer("controller", nth=2).raises(Planned)
    await handle.read_into(bytearray(SMALL))
    await handle.read_into(bytearray(SMALL))


def test_planned_transfer_can_be_left_out():
    wanted = {"mesh": None, "faults": None}
    outcomes = [
        run_once(_one_that_matters, wanted, SeededOptions({"gpus": 2}), 0, left_out=frozenset({left}))
        for left in ("f0", "f1")
    ]

    assert [type(outcome.error) for outcome in outcomes] == [Planned, type(None)]


# ---- failed operations -----------------------------------------------------------------------------------------------


@both
@simulate(seeds=10)
async def test_failed_transfers_of_a_batch_come_in_its_group(mesh, faults):
    """N4: the others of the batch are made."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault, 400)
    handle = await vault.handle.call_one()
    faults.transfer("controller", nth=2, times=2).raises(Planned("planned"))
    found = [bytearray(100) for _ in range(4)]

    with pytest.RaisesGroup(Planned, Planned) as caught:
        async with trimesh.rdma.batch() as batch:
            for number in range(4):
                batch.read(handle[100 * number : 100 * number + 100], into=found[number])

    assert isinstance(caught.value, MeshErrorGroup)
    parts = [pattern(400)[100 * number : 100 * number + 100] for number in range(4)]
    made = [got == part for got, part in zip(found, parts, strict=True)]
    assert made.count(True) == 2
    assert all(got == bytes(100) for got, is_made in zip(found, made, strict=True) if not is_made)


PUBLISHING_TRANSFERS = 4
"""Of a publication of two tensors into an empty slot: the layout, two tensors, the version."""


@pytest.mark.parametrize("nth", range(1, PUBLISHING_TRANSFERS + 1))
@both
@simulate(seeds=2)
async def test_failed_publish_publishes_nothing(mesh, faults, nth):
    """N4: whichever of its transfers fails; the next one works."""
    readers = await mesh.spawn("readers", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1))
        faults.transfer("controller", nth=nth).raises(Planned("planned"))

        with pytest.raises(Planned):
            await weights.publish(version_of(2))

        assert list((await readers.follow.call(weights, 1)).values()) == [[1], [1]]
        assert await weights.publish(version_of(2)) == 2
        assert list((await readers.follow.call(weights, 2)).values()) == [[2], [2]]


@pytest.mark.parametrize("nth", [1, 2])
@both
@simulate(seeds=2)
async def test_failed_publish_leaves_a_pinned_version_alone(mesh, faults, nth):
    """N4, BO-1: also if it fails just when it puts back the version that it finds pinned."""
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1))
        async with trio.open_nursery() as nursery:
            await _hold(nursery, reader, weights, 1)
            await weights.publish(version_of(2))
            faults.transfer("controller", nth=nth).raises(Planned("planned"))
            with pytest.raises(Planned):
                await weights.publish(version_of(3))
            with trio.move_on_after(0.1):
                await weights.publish(version_of(3))
                raise AssertionError("the only slot is pinned")
            await reader.let_go.call_one()
        assert await weights.publish(version_of(3)) == 3


@pytest.mark.parametrize("cancelled_at", range(1, 8))
@simulate(seeds=2)
async def test_cancelled_publish_leaves_a_pinned_version_alone(mesh, faults, cancelled_at):
    """N4, BO-1: wherever it is cancelled."""
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1))
        async with trio.open_nursery() as nursery:
            await _hold(nursery, reader, weights, 1)
            await weights.publish(version_of(2))
            faults.transfer("controller", times=100).delays(1)
            for seconds in (cancelled_at - 0.5, 100):
                with trio.move_on_after(seconds):
                    await weights.publish(version_of(3))
                    raise AssertionError("the only slot is pinned")
            faults.heal()
            await reader.let_go.call_one()
        assert await weights.publish(version_of(3)) == 3


async def _hold(nursery: trio.Nursery, reader: Any, weights: Any, version: int) -> None:
    """Let a reader pin a version until it is told to let go; what it holds must be whole then."""

    async def hold() -> None:
        assert await reader.hold.call_one(weights, version) == version

    nursery.start_soon(hold)
    await reader.pinned.call_one()


both_sizes = pytest.mark.parametrize("size", [SMALL_VERSION, LARGE_VERSION])


@both_sizes
@both
@simulate(seeds=10)
async def test_unpin_that_fails_is_tried_again(mesh, faults, size):
    """RE-2: the reader does not notice, and the publisher gets its memory."""
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1, size))
        async with trio.open_nursery() as nursery:
            await _hold(nursery, reader, weights, 1)
            faults.transfer({"gpus": 1}, nth=READING_TRANSFERS[size] + 1, times=3).raises(OSError("planned"))
            await reader.let_go.call_one()
        for number in range(2, 6):
            assert await weights.publish(version_of(number)) == number


@both_sizes
@pytest.mark.parametrize("pins_again", [False, True])
@simulate(seeds=2)
async def test_pin_that_cannot_be_given_back_at_once_is_given_back_later(mesh, faults, size, pins_again):
    """RE-2: also when the reader has pinned the same version again by then."""
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1, size))
        async with trio.open_nursery() as nursery:
            await _hold(nursery, reader, weights, 1)
            nth = READING_TRANSFERS[size] + 1
            heal = faults.plan(TransferFault(faults.where({"gpus": 1}), nth, 10**6, OSError("planned")))
            await reader.let_go.call_one()
        await weights.publish(version_of(2))
        with trio.move_on_after(10):
            await weights.publish(version_of(3))
            raise AssertionError("the only slot is pinned")
        heal()
        if pins_again:
            assert await reader.try_pin.call_one(weights, 1) == "1"
        for number in range(3, 6):
            assert await weights.publish(version_of(number)) == number


@simulate(seeds=2)
async def test_pin_is_given_back_by_a_loop_that_others_hold_up(mesh, faults):
    """RE-2: the task that gives it back has waited too long when it runs again."""
    faults.transfer({"gpus": 1}, times=10**6).delays(2 * limits.UNPIN_SECONDS)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        for number in range(1, 6):
            assert await weights.publish(version_of(number)) == number
            assert await reader.follow.call_one(weights, number) == [number]


@pytest.mark.parametrize(("size", "nth"), steps_of(FIRST_TRANSFERS))
@both
@simulate(seeds=2)
async def test_pin_that_fails_leaves_nothing_pinned(mesh, faults, size, nth):
    """RE-2: whichever transfer of the reader fails, from its first look at the board to the last byte."""
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    async with Published() as weights:
        await weights.publish(version_of(1, size))
        faults.transfer({"gpus": 1}, nth=nth).raises(Planned("planned"))
        with pytest.raises(Planned):
            await reader.follow.call_one(weights, 1)
        assert await reader.follow.call_one(weights, 1) == [1]
        for number in range(2, 6):
            assert await weights.publish(version_of(number)) == number
        assert await reader.follow.call_one(weights, 5) == [5]


@pytest.mark.parametrize(
    ("names", "transfers"),
    [("abcd", 3), ("bc", 1), ("acd", 3), ("cb", 1), ("b", 1)],
    ids=["all", "neighbours", "some", "neighbours in another order", "one"],
)
@both
@simulate(seeds=2)
async def test_small_tensors_that_are_neighbours_come_in_one_transfer(mesh, faults, fault_log, names, transfers):
    """RE-3: the last transfer is a look at the pin."""
    tensors = {"a": pattern(100_000, 1), "b": pattern(100, 2), "c": pattern(3_000, 3), "d": pattern(100_000, 4)}
    shelf = await mesh.slice(gpus=0).spawn("shelf", Shelf)
    weights = await shelf.publish.call_one(tensors)
    async with weights.pin() as snapshot:
        faults.transfer("controller", times=100).delays(1e-6)
        found = {name: bytearray(len(tensors[name])) for name in names}
        await snapshot.read_into(found)
        assert len(fault_log) == transfers + 1
    assert found == {name: tensors[name] for name in names}


# ---- processes that end, or stop, meanwhile --------------------------------------------------------------------------


@both
@simulate(seeds=10)
async def test_owner_is_killed_while_its_memory_is_read(faults):
    """N4: one reader is in the middle of it, one is about to begin, one is later; all get the diagnosis."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, LARGE)
        peekers = await procs.slice(gpus=slice(1, 3)).spawn("peekers", Peeker)
        handle = await vault.handle.call_one()
        faults.transfer(procs.slice(gpus=1), nth=2).delays(0.2)
        reading = attempt(nursery, peekers.read_for_ever.call, handle)
        await peekers.wait.call("has read")
        faults.kill(procs.slice(gpus=0))

        with pytest.raises(MeshErrorGroup) as caught:
            await reading.result()

        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ProcDied}
        with pytest.raises(ProcDied) as late:
            await handle.read_into(bytearray(LARGE))
        assert late.value.signal == signal.SIGKILL


@both
@simulate(seeds=4)
async def test_killed_reader_holds_neither_pin_nor_view(faults):
    """N4: it is killed while it reads, has a version pinned, and looks at memory; its owner goes on at once."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, LARGE, allocated=True)
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        doomed = procs.slice(gpus=1)
        reader, peeker = await doomed.spawn("reader", Reader), await doomed.spawn("peeker", Peeker)
        handle, weights = await vault.handle.call_one(), await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        calls = [
            attempt(nursery, reader.hold.call_one, weights, 1),
            attempt(nursery, peeker.look_for_ever.call_one, handle),
            attempt(nursery, peeker.read_for_ever.call_one, handle),
        ]
        await reader.pinned.call_one()
        await peeker.wait.call_one("sees 0")
        await peeker.wait.call_one("has read")
        faults.kill(doomed)

        for call in calls:
            with pytest.raises(ProcDied):
                await call.result()
        assert await publisher.publish.call_one(2, 6) == 6
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS


@pytest.mark.usefixtures("long_lease")
@both
@simulate(seeds=10)
async def test_stopped_owner_is_read_all_the_same(mesh, faults):
    """N4: no code over there runs for a transfer, nor for a pin."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault, LARGE)
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    peeker = await mesh.slice(gpus=1).spawn("peeker", Peeker)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle, weights = await vault.handle.call_one(), await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    assert await reader.follow.call_one(weights, 1) == [1]
    resume = faults.kill({"gpus": 0}, how="sigstop")

    assert await peeker.read.call_one(handle) == pattern(LARGE)
    await peeker.write.call_one(handle, bytes(LARGE))
    assert await peeker.count.call_one(handle[:8], 3) == [0, 1, 2]
    assert await reader.follow.call_one(weights, 1) == [1]

    resume()
    assert await publisher.publish.call_one(2, 6) == 6
    assert await vault.look.call_one(0, 9) == b"\3" + bytes(8)


@both
@simulate(seeds=10, per_host={"gpus": 3})
async def test_buffer_is_revoked_while_it_is_read(mesh, faults):
    """N4: who is late finds it revoked, too, and the owner does not wait for a transfer that has not begun."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault, LARGE)
    peekers = await mesh.slice(gpus=slice(1, 3)).spawn("peekers", Peeker)
    handle = await vault.handle.call_one()
    faults.transfer({"gpus": 1}, nth=2).delays(0.5)
    async with trio.open_nursery() as nursery:
        reading = attempt(nursery, peekers.read_for_ever.call, handle)
        await peekers.wait.call("has read")
        await trio.sleep(0.1)  # the late read has begun

        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS

        with pytest.raises(MeshErrorGroup) as caught:
            await reading.result()
    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {trio.ClosedResourceError}


@pytest.mark.parametrize("nth", range(1, PUBLISHING_TRANSFERS + 2))
@both
@simulate(seeds=2)
async def test_publisher_is_killed_in_the_middle_of_a_publish(faults, fault_log, nth):
    """N4: readers have the version before until it dies, and never a part of the new one."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        weights = await publisher.handle.call_one()
        await publisher.publish.call_one(1, 2)
        faults.transfer(procs.slice(gpus=0), nth=nth).delays(600)
        third = attempt(nursery, publisher.publish.call_one, 3)
        await _has_fired(fault_log)

        assert await reader.follow.call_one(weights, 2) == [2]
        waiting = attempt(nursery, reader.wait_newer.call_one, weights, 2)
        faults.kill(procs.slice(gpus=0))

        for call in (third, waiting):
            with pytest.raises(ProcDied):
                await call.result()
        assert await reader.try_pin.call_one(weights, 2) == "ProcDied"


def _isolated(faults: Any) -> Any:
    return trimesh.this_host().spawn_procs({"gpus": 3}, supervision=Isolate(), setup=faults.armed())


async def _has_fired(fault_log: Any) -> None:
    with trio.fail_after(20):
        while not len(fault_log):  # noqa: ASYNC110 - a real process tells by a message, and the log has no event
            await trio.sleep(0.01)
