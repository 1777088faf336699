"""Histories that tests record: of a mesh, simulated and over real processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
from tests.testing.actors import run_body

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import History, Model, NotLinearizable, simulate


class Replica(Actor):
    """Keeps the copy of a number."""

    def __init__(self) -> None:
        self.value = 0

    @endpoint
    async def store(self, value: int) -> None:
        self.value = value


class Primary(Actor):
    """A counter that stores its number at a replica before it answers."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.value = 0
        self.lock = trio.Lock()

    @endpoint(concurrency=4)
    async def add(self, n: int) -> int:
        async with self.lock:
            return await self.add_unlocked(n)

    @endpoint(concurrency=4)
    async def add_unlocked(self, n: int) -> int:
        value = self.value + n  # wrong: another task adds to the same number while this one waits
        await self.replica.store.call_one(value)
        self.value = value
        return value


async def add_from_two_clients(mesh: Any, name: str) -> History:
    replica = await mesh.slice(gpus=0).spawn("replica", Replica)
    primary: Any = await mesh.slice(gpus=1).spawn("primary", Primary, replica)
    history = History()

    async def client(point: Any) -> None:
        for number in range(1, 4):
            with history.invoke(point, "add", number) as adding:
                adding.ok(await getattr(primary, name).call_one(number))
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for point in mesh.points():
            nursery.start_soon(client, point)
    return history


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=10)
async def test_counter_that_takes_turns_is_linearizable(mesh):
    history = await add_from_two_clients(mesh, "add")
    assert len(history.operations) == 6
    history.check(Model.counter())


def test_seed_finds_the_counter_that_loses_updates():
    async def body(mesh: Any) -> None:
        history = await add_from_two_clients(mesh, "add_unlocked")
        history.check(Model.counter())

    found = [run_body(body, seed).error for seed in range(20)]

    failures = [error for error in found if error is not None]
    assert failures
    assert all(isinstance(error, NotLinearizable) for error in failures)
    assert "[gpus=0]" in str(failures[0])


class Uncertain(Actor):
    """Adds, and dies before it answers."""

    def __init__(self) -> None:
        self.value = 0

    @endpoint
    async def add(self, n: int) -> int:
        self.value += n
        return self.value


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=10, supervision=trimesh.Isolate())
async def test_outcome_of_a_call_whose_answer_is_lost_is_unknown(mesh, faults):
    counter = await mesh.slice(gpus=0).spawn("counter", Uncertain)
    history = History()
    with history.invoke("test", "add", 1) as adding:
        adding.ok(await counter.add.call_one(1))
    faults.call(counter.add).lose("reply")

    with pytest.raises(trimesh.MeshError), history.invoke("test", "add", 1) as adding:
        adding.ok(await counter.add.call_one(1))

    assert [one.status for one in history.operations] == ["ok", "unknown"]
    history.check(Model.counter())


@simulate(seeds=1)
async def test_recorder_says_each_end_once_and_stays_where_it_is():
    history = History()
    adding = history.invoke("a", "add", 1)
    assert adding.operation.status == "unknown"
    adding.fail()

    with pytest.raises(RuntimeError, match="an operation ends once"):
        adding.ok(1)
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pickle.dumps(history)
    assert "add(1)" in str(history)
    history.check(Model.counter())
