"""A register of three replicas with leases, under a nemesis of steps: the same function on each back end (S1)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import History, Model, NotLinearizable, simulate
from trimesh.testing.simulated.seeded_run import SeededOptions, run_once

LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 0.3

Entry = tuple[int, int, int]
"""Term of the leader that wrote it, its number, the value."""


class NotLeading(Exception):
    """Another replica leads, or none."""


class Replica(Actor):
    """Stores what the leader sends, and promises it not to help another one for the time of a lease."""

    def __init__(self) -> None:
        self.entry: Entry = (0, 0, 0)
        self.term = 0
        self.promised_to = -1
        self.promised_until = 0.0
        self.committed: Entry = (0, 0, 0)
        self.leads_until = 0.0
        self.leads_in = 0
        self.number = 0

    @endpoint
    async def meet(self, replicas: Any) -> None:
        self.replicas = replicas

    # ---- as one of a majority --------------------------------------------------------------------------------

    @endpoint(concurrency=8)
    async def promise(self, term: int, leader: int) -> tuple[int, Entry | None]:
        if term <= self.term or time.monotonic() < self.promised_until:
            return self.term, None
        self.term, self.promised_to, self.promised_until = term, leader, time.monotonic() + LEASE_SECONDS
        return self.term, self.entry

    @endpoint(concurrency=8)
    async def release(self, term: int, leader: int) -> None:
        if (term, leader) == (self.term, self.promised_to):
            self.promised_until = 0.0

    @endpoint(concurrency=8)
    async def store(self, term: int, entry: Entry) -> bool:
        if term == self.term:
            self.entry = max(self.entry, entry)
        return term == self.term

    # ---- as the leader ---------------------------------------------------------------------------------------

    async def ask(self, verb: Any, *args: Any) -> list[Any]:
        """Return what replicas answer in time."""
        found: list[Any] = []

        async def one(replica: Any) -> None:
            with trio.move_on_after(PATIENCE_SECONDS):
                found.extend(await answers_of(verb(replica), *args))

        async with trio.open_nursery() as nursery:
            for point in self.replicas.alive().points():
                nursery.start_soon(one, self.replicas.slice(**point))
        return found

    @endpoint
    async def lead(self) -> bool:
        """Ask a majority for a lease, and take over what it has stored."""
        if time.monotonic() < self.leads_until:
            return True
        began, term, own = time.monotonic(), self.term + 1, trimesh.current_rank()
        answers = await self.ask(lambda one: one.promise, term, own)
        self.term = max(self.term, *(seen for seen, _ in answers), 0)
        entries = [entry for seen, entry in answers if entry is not None and seen == term]
        if len(entries) < 2 or not await self._store(term, (term, 0, max(entries)[2])):
            await self.ask(lambda one: one.release, term, own)
            return False
        self.leads_in, self.leads_until = term, began + LEASE_SECONDS
        return True

    async def _store(self, term: int, entry: Entry) -> bool:
        if sum(await self.ask(lambda one: one.store, term, entry)) < 2:
            return False
        self.committed = max(self.committed, entry)
        return True

    @endpoint(concurrency=8)
    async def leads(self) -> bool:
        return time.monotonic() < self.leads_until

    @endpoint(concurrency=8)
    async def read(self) -> int:
        value = self.committed[2]
        if time.monotonic() >= self.leads_until:
            raise NotLeading
        return value

    @endpoint
    async def write(self, value: int) -> None:
        if time.monotonic() >= self.leads_until:
            raise NotLeading
        self.number += 1  # also after a write that too few have stored
        if not await self._store(self.leads_in, (self.leads_in, self.number, value)):
            raise TimeoutError


async def answers_of(verb: Any, *args: Any) -> list[Any]:
    """Return the answer of one replica, if it gives one."""
    outcomes = (await verb.options(abandon_after=0.1).call_settled(*args)).values()
    return [outcome.value for outcome in outcomes if outcome.ok]


async def leader_of(replicas: Any, first: int = 0) -> Any:
    """Return a replica that leads, or is elected now: one client asks this one first, another that one."""
    while True:
        points = list(replicas.alive().points())
        for number in range(len(points)):
            one = replicas.slice(**points[(first + number) % len(points)])
            for way in (one.leads, one.lead):
                with trio.move_on_after(3 * PATIENCE_SECONDS):
                    if await answers_of(way) == [True]:
                        return one
        await trio.sleep(0.05)


async def client(number: int, replicas: Any, history: History, steps: int, draw: Any) -> None:
    for step in range(steps):
        drawn = draw(number, step)
        await trio.sleep(drawn.uniform(0.05, 0.4))
        leader = await leader_of(replicas, drawn.randrange(3))
        call = ("read",) if drawn.random() < 0.5 else ("write", 100 * number + step)
        with history.invoke(f"client {number}", *call) as operation, trio.move_on_after(1):
            verb = getattr(leader, call[0]).options(abandon_after=0.1)
            (outcome,) = (await verb.call_settled(*call[1:])).values()
            if outcome.ok:
                operation.ok(outcome.value)
            elif isinstance(outcome.error, NotLeading):
                operation.fail()


def others_than(replica: Any, replicas: Any) -> Any:
    return replicas.exclude(list(replica.points()))


async def check_register(mesh: Any, chaos: Any, faults: Any, fault_log: Any, replica: Any = Replica) -> None:
    replicas = await mesh.spawn("replicas", replica)
    await replicas.meet.call(replicas)
    history, steps = History(), list[str]()

    async def nemesis(seconds: float) -> None:
        """Partition the leader: shorter than its lease, then for longer; then kill the next one."""
        if steps:
            return
        steps.append("began")
        for share in (0.5, 1 + seconds):
            leader = await leader_of(replicas)
            async with faults.partition(leader, others_than(leader, replicas)):
                await trio.sleep(share * LEASE_SECONDS)
            await trio.sleep(LEASE_SECONDS / 2)
        faults.kill(await leader_of(replicas))
        steps.append("ended")

    plan = chaos.plan(nemeses={nemesis: 1}, every=(0.1, 0.2), bounds={"nemesis": (0.2, 1)})
    async with chaos.safety(plan, duration=40):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(client, number, replicas, history, 12, chaos.draw)
        while "ended" not in steps:  # noqa: ASYNC110 - clients may be faster than the nemesis
            await trio.sleep(0.1)
    async with chaos.liveness(within=30):
        await client(2, replicas, history, 2, chaos.draw)
    history.check(Model.register(0))
    assert [str(fired.fault).partition(" ")[0] for fired in fault_log] == ["partition", "partition", "kill"]


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=6, real_seeds=2, per_host={"replicas": 3}, supervision=trimesh.Isolate())
async def test_register_on_one_host(mesh, chaos, faults, fault_log):
    await check_register(mesh, chaos, faults, fault_log)


@pytest.mark.mesh_backend("sim", "net")
@simulate(seeds=3, real_seeds=2, hosts=3, per_host={"replicas": 1}, supervision=trimesh.Isolate())
async def test_register_on_three_hosts(mesh, chaos, faults, fault_log):
    await check_register(mesh, chaos, faults, fault_log)


class EternalLeader(Replica):
    """Believes that its lease never ends."""

    @endpoint(concurrency=8)
    async def leads(self) -> bool:
        return self.leads_in > 0

    @endpoint(concurrency=8)
    async def read(self) -> int:
        return self.committed[2]


def test_leader_without_a_lease_is_found():
    """By one of a few seeds."""

    async def body(mesh: Any, chaos: Any, faults: Any, fault_log: Any) -> None:
        await check_register(mesh, chaos, faults, fault_log, EternalLeader)

    options = SeededOptions({"replicas": 3}, {"supervision": trimesh.Isolate()})
    wanted = dict.fromkeys(("mesh", "chaos", "faults", "fault_log"))
    assert any(isinstance(run_once(body, wanted, options, seed).error, NotLinearizable) for seed in range(6))
