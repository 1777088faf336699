"""Seeds over real processes decide chaos and jitter; they find a lost acknowledgement and a stale read."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import pytest
import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing.running import (
    REAL_SEEDS,
    ItemRun,
    RunSettings,
    SeedPlan,
    Simulated,
    run_over_processes,
    run_simulated,
)
from trimesh.testing.simulated.seeded_run import SeededOptions

DEPOSITS: Final = 40
RESTARTS: Final = trimesh.Restart("one_for_one", intensity=1000, period=60, backoff=trimesh.Backoff(0.05, 0.2))


class Bank(Actor):
    """Keeps a balance; a deposit with a key counts once."""

    def __init__(self) -> None:
        self.balance = 0
        self.keys: set[int] = set()

    @endpoint
    async def deposit(self, key: int | None) -> None:
        if key is None or key not in self.keys:
            self.balance += 1
        if key is not None:
            self.keys.add(key)

    @endpoint
    async def total(self) -> int:
        return self.balance


class Teller(Actor):
    """Passes deposits on, with keys or, which is wrong, without."""

    def __init__(self, bank: Any, has_keys: bool) -> None:
        self.bank, self.has_keys = bank, has_keys

    @endpoint
    async def deposit(self, key: int) -> None:
        await self.bank.deposit.call_one(key if self.has_keys else None)


def deposits(*, has_keys: bool) -> Callable[..., Awaitable[None]]:
    """Return a body whose client repeats a deposit that was not acknowledged."""

    async def body(mesh: Any, chaos: Any) -> None:
        bank = await mesh.slice(gpus=0).spawn("bank", Bank)
        tellers = mesh.slice(gpus=1)
        teller = await tellers.spawn("teller", Teller, bank, has_keys)
        async with chaos.safety(chaos.plan(kill=1, every=(0.1, 1.0)), duration=30, of=tellers):
            for key in range(DEPOSITS):
                while True:
                    try:
                        await teller.deposit.call_one(key)
                        break
                    except trimesh.MeshError:  # killed, or being replaced
                        await trio.sleep(0.01)
                await trio.sleep(0.02)
        assert await bank.total.call_one() == DEPOSITS

    return body


class Primary(Actor):
    """Keeps a value and passes it on to a replica: waits until that has it or, which is wrong, for a while."""

    def __init__(self, replica: Any, waits: bool) -> None:
        self.replica, self.waits = replica, waits

    @endpoint
    async def write(self, value: int) -> None:
        if self.waits or value == 0:  # the first one makes the link
            await self.replica.store.call_one(value)
        else:
            await self.replica.store.broadcast(value)
            await trio.sleep(0.02)  # it will have come by then


class Replica(Actor):
    """Answers reads."""

    def __init__(self) -> None:
        self.value = 0

    @endpoint
    async def store(self, value: int) -> None:
        self.value = value

    @endpoint
    async def read(self) -> int:
        return self.value


def reads(*, waits: bool) -> Callable[..., Awaitable[None]]:
    """Return a body that reads what it has written."""

    async def body(mesh: Any) -> None:
        replica = await mesh.slice(gpus=0).spawn("replica", Replica)
        primary = await mesh.slice(gpus=1).spawn("primary", Primary, replica, waits)
        for value in range(30):
            await primary.write.call_one(value)
            assert await replica.read.call_one() == value

    return body


def item(body: Callable[..., Awaitable[None]], **plan: Any) -> ItemRun:
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    options = SeededOptions({"gpus": 2}, {"supervision": RESTARTS})
    settings = RunSettings(seeds=SeedPlan(**plan))
    return ItemRun(
        "test_bank.py::test_deposits[proc]", body, dict.fromkeys(names), Simulated(20, (), options), settings
    )


@pytest.mark.slow
def test_simulation_finds_a_lost_acknowledgement():
    with pytest.raises(AssertionError, match="== 40"):
        run_simulated(item(deposits(has_keys=False)))
    run_simulated(item(deposits(has_keys=True), count=4))


@pytest.mark.real
@pytest.mark.daily
def test_real_processes_find_a_lost_acknowledgement():
    run = item(deposits(has_keys=False), count=20)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="== 40"), flatten_subgroups=True) as caught:
        run_over_processes(run)

    seed = len(run.ran)  # the one that failed comes after those that passed
    assert f"replay: pytest 'test_bank.py::test_deposits[proc]' --mesh-seed={seed:#x}" in caught.value.__notes__


def test_simulation_finds_a_stale_read():
    with pytest.raises(AssertionError, match="=="):
        run_simulated(item(reads(waits=False)))
    run_simulated(item(reads(waits=True), count=4))


@pytest.mark.real
def test_real_processes_find_a_stale_read():
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="=="), flatten_subgroups=True):
        run_over_processes(item(reads(waits=False), count=5))
    run_over_processes(item(reads(waits=True), count=3))


@pytest.mark.real
def test_right_program_passes_over_real_processes():
    run = item(deposits(has_keys=True))
    run_over_processes(run)

    assert run.ran == set(range(REAL_SEEDS))


@pytest.mark.real
def test_test_without_chance_runs_once_by_default_over_real_processes():
    runs: list[int] = []

    async def body(mesh: Any, faults: Any) -> None:
        runs.append(mesh.size())
        faults.loop({"gpus": 0}).lag(0.01)

    run = item(body)
    run_over_processes(run)
    assert (runs, run.ran) == ([2], set())

    run = item(body, count=2)
    run_over_processes(run)
    assert (runs, run.ran) == ([2, 2, 2], {0, 1})


@pytest.mark.real
def test_seeds_of_a_test_have_processes_of_their_own():
    """S4: they share what starts them."""
    pids: list[int] = []

    class Named(Actor):
        @endpoint
        async def pid(self) -> int:
            return os.getpid()

    async def body(mesh: Any) -> None:
        named = await mesh.spawn("named", Named)
        pids.extend((await named.pid.call()).values())

    run = item(body)
    run.simulated = attrs.evolve(run.simulated, real_seeds=3)
    run_over_processes(run)

    assert run.ran == {0, 1, 2}
    assert len(set(pids)) == len(pids) == 6


@pytest.mark.real
def test_seed_decides_a_fault_by_chance_over_real_processes():
    runs: list[int] = []

    async def body(mesh: Any, faults: Any) -> None:
        runs.append(mesh.size())
        faults.clock(mesh).skew(1.0)

    run_over_processes(item(body, first=7))

    assert len(runs) == REAL_SEEDS


@pytest.mark.real
def test_replacement_counts_as_up_when_it_takes_faults():
    async def body(mesh: Any, faults: Any) -> None:
        second = mesh.slice(gpus=1)
        for _ in range(3):
            (before,) = (place,) = faults.where(second).places
            faults.kill(second, how="sigkill")
            while place == before or not faults.executor.is_alive(place):
                await trio.sleep(0.001)
                (place,) = faults.where(second).places
            faults.loop(second).lag(0.001)  # was refused: the replacement had not said yet that it takes faults

    run_over_processes(item(body))
