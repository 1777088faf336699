"""Defects that other stacks for reinforcement learning have had; README.md in this folder lists them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.service.test_dispatcher import dispatcher, submitted
from tests.service.test_pool import HEALED, Generator, until
from tests.service.test_work import check_closed

import trimesh
from trimesh import Actor, ProcDied, RemoteCancelled, endpoint, limits
from trimesh.service import open_pool, open_replay, open_slots
from trimesh.testing import simulate


class Uneven(Actor):
    """One member takes a hundred times as long as the others."""

    @endpoint
    async def generate(self) -> int:
        rank = trimesh.current_rank()
        await trio.sleep(0.1 if rank else 10)
        return rank


@simulate(seeds=3, per_host={"gpus": 2})
async def test_item_of_a_map_that_fails_is_an_error_and_no_value(mesh):
    """torchforge: `fanout` gives None in the place of what has failed."""
    generators = await mesh.spawn("generators", Generator)
    found: dict[int, Any] = {}
    async with open_pool(generators) as pool:
        with pytest.raises(ExceptionGroup) as caught:
            async with pool.map.generate(["a", "bad", "b"]) as results:
                async for index, value in results:
                    found[index] = value[0]
        assert caught.group_contains(ValueError, match="bad")
        assert found.items() <= {0: "A", 2: "B"}.items()


@simulate(seeds=3, per_host={"gpus": 1}, **HEALED)
async def test_request_that_ends_each_replica_is_made_no_more_than_so_often(mesh, faults):
    """Y1. torchforge: a replica is recovered again and again, without a limit."""
    generators = await mesh.spawn("generators", Generator)
    deaths = 0
    async with open_pool(generators) as pool, trio.open_nursery() as nursery:

        async def kill() -> None:
            nonlocal deaths
            while True:
                await until(lambda: pool.statistics().running == 1)
                await trio.sleep(1)
                faults.kill(mesh.slice(gpus=0))
                deaths += 1
                await until(lambda: not pool.statistics().replicas[0].is_up or pool.statistics().failed == 1)

        nursery.start_soon(kill)
        with pytest.raises(ProcDied):
            await pool.again("poison", 1_000.0)
        nursery.cancel_scope.cancel()
    assert deaths == limits.POOL_TRIES


@pytest.mark.parametrize("way", ["down", "drained", "absent"])
def test_requests_of_a_session_go_elsewhere_however_their_replica_goes_out(way: str) -> None:
    """Y4. torchforge: what waits for a replica that has failed is moved on one of the ways only."""
    machine = dispatcher()
    submitted(machine, session="a")
    [(_, replica)] = machine.take()
    waiting = submitted(machine, session="a")
    assert machine.take() == []
    match way:
        case "down":
            machine.set_up(replica.index, is_up=False)
        case "drained":
            machine.set_drained(replica.index, is_drained=True)
        case _:
            machine.set_absent(replica.index, is_absent=True)
    [(request, other)] = machine.take()
    assert request is waiting
    assert other is not replica


@simulate(seeds=3, per_host={"gpus": 1})
async def test_loop_ends_by_the_error_of_a_worker_and_the_trainer_waits_no_longer(mesh):
    """torchforge, SkyRL, TRL: rollouts that die unseen leave a trainer that waits for ever, or polls."""
    generators = await mesh.spawn("generators", Generator)
    async with (
        open_pool(generators) as pool,
        open_slots(batch=4, staleness=0) as slots,
        open_replay(capacity=9, slots=slots) as buffer,
    ):

        async def roll(prompt: str) -> None:
            async with slots.lease() as lease:
                await buffer.add(await pool.generate(prompt, 1.0), version=lease.version)

        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                for prompt in ("a", "b", "bad"):
                    nursery.start_soon(roll, prompt)
                await buffer.take(4)
        assert caught.group_contains(ValueError, match="bad")
        assert slots.statistics().running == 0
        check_closed(buffer, slots)


@simulate(seeds=3, per_host={"gpus": 3})
async def test_slowest_generator_delays_its_own_requests_only(mesh):
    """TitanRL: the slowest generator delays all, at requests and at updates of weights."""
    uneven = await mesh.spawn("uneven", Uneven)
    ranks: Counter[int] = Counter()
    async with open_pool(uneven, concurrency=1) as pool:

        async def ask() -> None:
            ranks[await pool.generate()] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(ask)
        assert ranks[0] == 1
        async with pool.rolling() as replicas:
            async for replica in replicas:
                [out] = [one.index for one in pool.statistics().replicas if one.is_drained]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(replica.generate.call)  # the update
                    assert await pool.generate() != out


@simulate(seeds=3, per_host={"gpus": 2})
@pytest.mark.parametrize("is_before", [True, False])
async def test_stale_groups_are_cancelled_before_or_inside_of_a_pause(mesh, *, is_before):
    """Y5. prime-rl: stale work must be drained before the engines are paused, else they die."""
    generators = await mesh.spawn("generators", Generator)
    outcomes: list[str] = []

    async def ask(number: int) -> None:
        group = "stale" if number % 2 else "fresh"
        try:
            await pool.options(group=group).generate("x", 2.0)
            outcomes.append(group)
        except RemoteCancelled:
            outcomes.append("cancelled")

    async with open_pool(generators, concurrency=1) as pool, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, number)
        await trio.sleep(1)
        if is_before:
            assert pool.cancel(group="stale") == 3
        async with pool.paused("keep"):
            if not is_before:
                assert pool.cancel(group="stale") == 3
            await generators.load.call(1)
    assert sorted(outcomes) == ["cancelled"] * 3 + ["fresh"] * 3
    assert all(one.is_up and not one.running for one in pool.statistics().replicas)


@simulate(seeds=3, per_host={"gpus": 1})
async def test_youngest_groups_are_shed_whole_and_their_slots_are_free_again(mesh):
    """Y5, Y7. prime-rl: what is begun last goes first when there is too much, each group once and as one."""
    generators = await mesh.spawn("generators", Generator)
    ended: list[tuple[int, str]] = []
    async with (
        open_pool(generators, concurrency=2) as pool,
        open_slots(batch=8, staleness=0) as slots,
        open_replay(capacity=9, slots=slots) as buffer,
        trio.open_nursery() as nursery,
    ):

        async def roll(group: int) -> None:
            try:
                async with slots.lease(group=2) as lease:
                    for _ in range(2):
                        await buffer.add(await pool.options(group=group).generate("x", 1.0), version=lease.version)
                ended.append((group, "trained"))
            except RemoteCancelled:
                ended.append((group, "shed"))

        for group in range(4):
            nursery.start_soon(roll, group)
            await trio.testing.wait_all_tasks_blocked()
        assert [pool.cancel(group=group) for group in (3, 2)] == [1, 1]
    assert sorted(ended) == [(0, "trained"), (1, "trained"), (2, "shed"), (3, "shed")]
    assert (slots.statistics().returned, slots.statistics().handed_on) == (4, 4)
    check_closed(buffer, slots)


def test_each_trap_of_the_document_names_tests_that_there_are() -> None:
    root = Path(__file__).parents[2]
    _, traps = Path(__file__).with_name("README.md").read_text().split("\n## Traps\n")
    rows = [line for line in traps.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        cell = row.split("|")[4]
        folder = root / "tests" / "examples" if "tests/examples" in cell else Path(__file__).parent
        there = "".join(path.read_text() for path in folder.glob("test_*.py"))
        names = re.findall(r"`(test_\w+)`", cell)
        assert names, row
        assert all(f"def {name}(" in there for name in names), row
