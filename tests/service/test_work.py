"""Slots and replay buffers: nothing is trained too late, and each item is accounted for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Isolate, MeshStopped, endpoint
from trimesh.service import ReplayBuffer, Slots, open_pool, open_replay, open_slots
from trimesh.testing import simulate

both = pytest.mark.mesh_backend("sim", "proc")
ISOLATED: dict[str, Any] = {"supervision": Isolate()}


def check_closed(buffer: ReplayBuffer[Any], slots: Slots) -> None:
    """Every item, and every slot, is in exactly one place."""
    items, places = buffer.statistics(), slots.statistics()
    assert items.added == items.stored + items.held + items.taken + sum(items.evicted.values())
    assert places.begun == places.running + places.returned + places.handed_on + places.lost


class Roller(Actor):
    @endpoint(concurrency=8)
    async def roll(self, slots: Any, buffer: Any, number: int) -> int:
        async with slots.lease() as lease:
            await buffer.add(number, version=lease.version)
        return lease.version  # type: ignore[no-any-return]

    @endpoint(concurrency=8)
    async def begin(self, slots: Any) -> None:
        async with slots.lease():
            await trio.sleep_forever()

    @endpoint(concurrency=8)
    async def fail(self, slots: Any) -> None:
        async with slots.lease():
            raise ValueError("no reward")

    @endpoint(concurrency=8)
    async def train(self, buffer: Any, count: int) -> list[int]:
        return await buffer.take(count)  # type: ignore[no-any-return]

    @endpoint(concurrency=8)
    async def hold(self, buffer: Any) -> None:
        async with buffer.taking(2):
            await trio.sleep_forever()

    @endpoint
    async def end_version(self, slots: Any, version: int) -> None:
        await slots.advance(version=version)


class Generator(Actor):
    def __init__(self) -> None:
        self.version = 0

    @endpoint(concurrency=4)
    async def generate(self, seconds: float) -> int:
        version = self.version
        await trio.sleep(seconds)
        return version

    @endpoint
    def pull(self, version: int) -> None:
        self.version = version


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    with trio.fail_after(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


@both
@simulate(seeds=10, per_host={"gpus": 2})
async def test_actors_lease_add_take_and_advance_through_handles(mesh):
    """Y7, Y8."""
    rollers = await mesh.spawn("rollers", Roller)
    async with open_slots(batch=2, staleness=1) as slots, open_replay(capacity=10, slots=slots) as buffer:
        for number in range(4):
            assert await rollers.slice(gpus=number % 2).roll.call_one(slots, buffer, number) == 0
        with trio.move_on_after(0.2) as waited:
            await rollers.slice(gpus=0).roll.call_one(slots, buffer, 4)
        assert waited.cancelled_caught  # the fifth would be trained two versions later
        assert await rollers.slice(gpus=1).train.call_one(buffer, 2) == [0, 1]
        await rollers.slice(gpus=0).end_version.call_one(slots, 1)
        assert await rollers.slice(gpus=0).roll.call_one(slots, buffer, 5) == 1
        await until(lambda: slots.statistics().running == 0)
        assert (buffer.statistics().stored, buffer.statistics().taken) == (3, 2)
        check_closed(buffer, slots)


@both
@simulate(seeds=10, per_host={"gpus": 2}, **ISOLATED)
async def test_slots_of_holders_that_die_or_raise_are_given_back(mesh, faults):
    """Y7."""
    rollers = await mesh.spawn("rollers", Roller)
    async with open_slots(batch=1, staleness=0) as slots, open_replay(capacity=10, slots=slots) as buffer:
        with pytest.raises(ValueError, match="no reward"):
            await rollers.slice(gpus=0).fail.call_one(slots)
        async with trio.open_nursery() as nursery:

            async def lose() -> None:
                with pytest.raises(trimesh.ProcDied):
                    await rollers.slice(gpus=0).begin.call_one(slots)

            nursery.start_soon(lose)
            await until(lambda: slots.statistics().running == 1)
            faults.kill(mesh.slice(gpus=0))
        assert await rollers.slice(gpus=1).roll.call_one(slots, buffer, 7) == 0
        await until(lambda: slots.statistics().running == 0)
        check_closed(buffer, slots)
        assert slots.statistics().returned == 2


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"gpus": 2}, **ISOLATED)
async def test_items_of_consumers_that_die_are_there_again(mesh, faults):
    """Y8: a trainer that dies in its step has trained nothing."""
    rollers = await mesh.spawn("rollers", Roller)
    async with open_slots(batch=2, staleness=0) as slots, open_replay(capacity=10, slots=slots) as buffer:
        for number in range(2):
            await buffer.add(number, version=0)
        async with trio.open_nursery() as nursery:

            async def lose() -> None:
                with pytest.raises(trimesh.ProcDied):
                    await rollers.slice(gpus=0).hold.call_one(buffer)

            nursery.start_soon(lose)
            await until(lambda: buffer.statistics().held == 2)
            faults.kill(mesh.slice(gpus=0))
        with trio.fail_after(HANG_SECONDS):
            assert await rollers.slice(gpus=1).train.call_one(buffer, 2) == [0, 1]
        await until(lambda: buffer.statistics().taken == 2)
        check_closed(buffer, slots)


@simulate(seeds=10)
async def test_work_that_is_begun_has_a_version_that_the_generators_have():
    """Y7: slots are freed when the generators have pulled, so nothing is older at its begin than its lease says."""
    async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
        generators = await procs.spawn("generators", Generator)
        used: list[tuple[int, int, int]] = []
        async with (
            open_pool(generators, concurrency=4) as pool,
            open_slots(batch=2, staleness=1) as slots,
            open_replay(capacity=20, slots=slots) as buffer,
            trio.open_nursery() as nursery,
        ):

            async def roll(index: int) -> None:
                while True:
                    async with slots.lease() as lease:
                        born = await pool.generate(0.1 + 0.05 * index)
                        await buffer.add((lease.version, born), version=lease.version)

            for index in range(6):
                nursery.start_soon(roll, index)
            for version in range(1, 9):
                used += [(version - 1, leased, born) for leased, born in await buffer.take(2)]
                await trio.sleep(0.2)
                await generators.pull.call(version)
                await slots.advance(version=version)
                check_closed(buffer, slots)
            nursery.cancel_scope.cancel()
    assert len(used) == 16
    assert all(born >= leased and trained - leased <= 1 for trained, leased, born in used)
    assert any(trained - leased == 1 for trained, leased, _ in used)


@both
@simulate(seeds=5)
async def test_resumed_slots_do_not_burst():
    """Y9: AReaL counted what was accepted from 0 after a resume, and began a run's worth of work at once."""
    async with trimesh.this_host().spawn_procs({"gpus": 1}):
        async with open_slots(batch=2, staleness=1) as slots, open_replay(capacity=9, slots=slots) as buffer:
            for version in range(1, 6):
                for number in range(2):
                    async with slots.lease() as lease:
                        await buffer.add((version, number), version=lease.version)
                await buffer.take(2)
                await slots.advance(version=version)
            async with slots.lease() as lease:
                await buffer.add("kept", version=lease.version)
                saved = slots.state_dict(), buffer.state_dict()

        async with open_slots(batch=2, staleness=1) as slots, open_replay(capacity=9, slots=slots) as buffer:
            slots.load_state_dict(saved[0])
            buffer.load_state_dict(saved[1])
            async with trio.open_nursery() as nursery:

                async def hold() -> None:
                    async with slots.lease():
                        await trio.sleep_forever()

                for _ in range(10):
                    nursery.start_soon(hold)
                await until(lambda: slots.statistics().waiting == 7)
                places = slots.statistics()
                assert (places.running, places.in_use, places.waiting, places.lost) == (3, 4, 7, 1)
                check_closed(buffer, slots)
                assert await buffer.take(1) == ["kept"]
                nursery.cancel_scope.cancel()
            assert slots.statistics().version == 5
            check_closed(buffer, slots)


@simulate(seeds=5)
async def test_full_buffer_lets_adders_wait_and_drops_nothing_unsaid():
    """Y8: verl drops the oldest sample of a full queue."""
    async with trimesh.this_host().spawn_procs({"gpus": 1}):
        async with open_replay(capacity=2) as buffer, trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(lambda number=number: buffer.add(number, version=0))
            await trio.sleep(1)
            assert buffer.statistics().added == 2
            assert sorted(await buffer.take(2) + await buffer.take(2) + await buffer.take(1)) == [0, 1, 2, 3, 4]
            assert buffer.statistics().evicted == {}
        async with open_replay(capacity=2, when_full="evict") as buffer:
            for number in range(5):
                await buffer.add(number, version=0)
            assert buffer.statistics().evicted == {"full": 3}
            assert await buffer.take(2) == [3, 4]


@simulate(seeds=5)
async def test_consumers_wait_without_polling_and_are_ended_with_the_block():
    """Y8: torchforge's callers poll a buffer that returns None."""
    ended: list[str] = []

    async def wait(name: str, waiting: Any) -> None:
        try:
            await waiting
        except MeshStopped:
            ended.append(name)

    async with trimesh.this_host().spawn_procs({"gpus": 1}), trio.open_nursery() as nursery:
        async with open_slots(batch=1, staleness=0) as slots, open_replay(capacity=4) as buffer:
            async with slots.lease():
                await buffer.add("one", version=0)
            with trio.move_on_after(1) as waited:
                await buffer.take(2)
            assert waited.cancelled_caught
            assert buffer.statistics().stored == 1
            nursery.start_soon(wait, "take", buffer.take(2))
            nursery.start_soon(wait, "sample", buffer.sample(3))
            nursery.start_soon(wait, "lease", slots.lease().__aenter__())
            await trio.sleep(1)
            assert ended == []
        await trio.lowlevel.checkpoint()
    assert sorted(ended) == ["lease", "sample", "take"]


@simulate(seeds=5)
@pytest.mark.parametrize("how", ["clear", "full"])
async def test_waiting_leases_are_granted_when_items_are_evicted(how):
    """Y7: evicted items free their slots at once, not when the next lease ends."""
    async with (
        trimesh.this_host().spawn_procs({"gpus": 1}),
        open_slots(batch=3, staleness=0) as slots,
        open_replay(capacity=9, capacity_bytes=3000, when_full="evict", slots=slots) as buffer,
        trio.open_nursery() as nursery,
    ):
        granted = trio.Event()

        async def wait() -> None:
            async with slots.lease():
                granted.set()

        async with slots.lease() as lease:
            for _ in range(2):
                await buffer.add(bytes(1000), version=lease.version)
            nursery.start_soon(wait)
            await until(lambda: slots.statistics().waiting == 1)
            if how == "clear":
                assert buffer.clear(reason="another task") == 2
            else:
                await buffer.add(bytes(2500), version=lease.version)  # fits if both others go
            with trio.fail_after(HANG_SECONDS):
                await granted.wait()
        assert sum(buffer.statistics().evicted.values()) == 2
        check_closed(buffer, slots)


@simulate(seeds=5)
@pytest.mark.parametrize("first", ["cancel", "grant"])
async def test_lease_that_is_cancelled_as_it_is_granted_gives_its_slots_back(first):
    """Y7: both happen before its task runs again."""
    async with (
        trimesh.this_host().spawn_procs({"gpus": 1}),
        open_slots(batch=1, staleness=0) as slots,
        open_replay(capacity=9, slots=slots) as buffer,
    ):
        await buffer.add("old", version=0)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                async with slots.lease():
                    await trio.sleep_forever()

            nursery.start_soon(wait)
            await until(lambda: slots.statistics().waiting == 1)
            if first == "cancel":
                nursery.cancel_scope.cancel()
            buffer.clear(reason="another task")  # grants the lease
            assert slots.statistics().running == 1
            nursery.cancel_scope.cancel()
        places = slots.statistics()
        assert (places.begun, places.returned, places.in_use) == (1, 1, 0)
        with trio.fail_after(HANG_SECONDS):
            async with slots.lease():
                check_closed(buffer, slots)


@simulate(seeds=5)
async def test_group_leases_are_not_starved_by_single_ones():
    """Y7."""
    async with trimesh.this_host().spawn_procs({"gpus": 1}), open_slots(batch=4, staleness=0) as slots:
        order: list[str] = []

        async def use(name: str, group: int) -> None:
            async with slots.lease(group=group):
                order.append(name)
                await trio.sleep(1)
            await slots.release(group)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(use, "early", 1)
            await trio.sleep(0.5)
            nursery.start_soon(use, "group", 4)
            await trio.sleep(0.1)
            for _ in range(8):
                nursery.start_soon(use, "late", 1)
        assert order == ["early"] * 4 + ["group"] + ["late"] * 8
        with pytest.raises(ValueError, match="1 to 4 slots"):
            async with slots.lease(group=5):
                pass
