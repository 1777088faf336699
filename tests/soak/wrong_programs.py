"""Small programs with a bug that only some schedules or faults show, each beside the right program.

They stand for the programs of users: nothing of the runtime is wrong in them. `tests.soak.first_failures` counts the
seeds until each bug shows. Simulated processes share this one, so a program notes in its `Store` what outlives them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import attrs
import trio

from trimesh import Actor, MeshError, ProcDied, Restart, endpoint
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

RESTART: Final = Restart("one_for_one", intensity=10_000, period=60)


@attrs.define(eq=False)
class Store:
    """What outlives processes.

    Attributes:
        is_wrong: Whether the program has its bug.
        log: Effects, in order.
        values: Others, by name.
    """

    is_wrong: bool
    log: list[Any] = attrs.field(factory=list[Any])
    values: dict[Any, Any] = attrs.field(factory=dict[Any, Any])


STORES: list[Store] = []
"""The current one."""


def store() -> Store:
    return STORES[-1]


# ---- orders of messages ----------------------------------------------------------------------------------------------


class Register(Actor):
    """Keeps a value, for others."""

    def __init__(self) -> None:
        self.value = 0
        self.started: set[int] = set()

    @endpoint
    async def read(self) -> int:
        return self.value

    @endpoint
    async def write(self, value: int) -> None:
        self.value = value

    @endpoint
    async def add(self, value: int) -> None:
        self.value += value


class Counter(Actor):
    """Loses updates: others add to the same number while one is written."""

    def __init__(self, replica: Any) -> None:
        self.replica, self.value, self.lock = replica, 0, trio.Lock()

    @endpoint(concurrency=4)
    async def add(self, number: int) -> None:
        if store().is_wrong:
            await self._add(number)
        else:
            async with self.lock:
                await self._add(number)

    async def _add(self, number: int) -> None:
        value = self.value + number
        await self.replica.write.call_one(value)
        self.value = value


async def lost_update(mesh: Any, chaos: Any) -> None:
    replica = await mesh.slice(gpus=0).spawn("replica", Register)
    counter = await mesh.slice(gpus=1).spawn("counter", Counter, replica)

    async def client(name: str) -> None:
        for number in range(12):
            await trio.sleep(chaos.draw(name, number).uniform(0, 1))
            await counter.add.call_one(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, "alice")
        nursery.start_soon(client, "bob")
    assert await replica.read.call_one() == 24


class Cache(Actor):
    """Fills itself with a value that is out of date when it arrives."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.value: int | None = None
        self.changes = 0

    @endpoint(concurrency=4)
    async def get(self) -> int:
        if self.value is not None:
            return self.value
        changes = self.changes
        value = await self.source.read.call_one()
        if store().is_wrong or changes == self.changes:
            self.value = value
        return int(value)

    @endpoint
    async def forget(self) -> None:
        self.value = None
        self.changes += 1


async def stale_cache(mesh: Any, chaos: Any) -> None:
    source = await mesh.slice(gpus=0).spawn("source", Register)
    cache = await mesh.slice(gpus=1).spawn("cache", Cache, source)

    async def write() -> None:
        for value in range(1, 31):
            await trio.sleep(chaos.draw("write", value).uniform(0, 0.1))
            await source.write.call_one(value)
            await cache.forget.call_one()
            if value % 3 == 0:
                await trio.sleep(0.2)
                assert await cache.get.call_one() == value

    async def read() -> None:
        for number in range(40):
            await trio.sleep(chaos.draw("read", number).uniform(0, 0.2))
            await cache.get.call_one()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        nursery.start_soon(read)


class Sequel(Actor):
    """Expects that the beginning arrives before the end, which travels by another process."""

    def __init__(self) -> None:
        self.begun: set[int] = set()

    @endpoint
    async def begin(self, number: int) -> None:
        self.begun.add(number)

    @endpoint
    async def end(self, number: int) -> None:
        assert number in self.begun


class Messenger(Actor):
    def __init__(self, sequel: Any) -> None:
        self.sequel = sequel

    @endpoint
    async def end(self, number: int) -> None:
        await self.sequel.end.call_one(number)


class Beginner(Actor):
    def __init__(self, sequel: Any, messenger: Any) -> None:
        self.sequel, self.messenger = sequel, messenger

    @endpoint
    async def run(self, number: int) -> None:
        if store().is_wrong:
            await self.sequel.begin.broadcast(number)
        else:
            await self.sequel.begin.call_one(number)
        await self.messenger.end.call_one(number)


async def overtaken(mesh: Any, chaos: Any) -> None:
    del chaos
    sequel = await mesh.slice(gpus=0).spawn("sequel", Sequel)
    messenger = await mesh.slice(gpus=1).spawn("messenger", Messenger, sequel)
    beginner = await mesh.slice(gpus=2).spawn("beginner", Beginner, sequel, messenger)
    for number in range(3):
        await beginner.run.call_one(number)


async def torn_read(mesh: Any, chaos: Any) -> None:
    """One value moves from one register to the other, and is missed or seen twice in between."""
    one = await mesh.slice(gpus=0).spawn("one", Register)
    other = await mesh.slice(gpus=1).spawn("other", Register)
    lock = trio.Lock()
    await one.write.call_one(30)

    async def move() -> None:
        for number in range(20):
            await trio.sleep(chaos.draw("move", number).uniform(0, 0.2))
            async with lock:
                await one.add.call_one(-1)
                await other.add.call_one(1)

    async def read() -> None:
        for number in range(20):
            await trio.sleep(chaos.draw("read", number).uniform(0, 0.2))
            if store().is_wrong:
                total = await one.read.call_one() + await other.read.call_one()
            else:
                async with lock:
                    total = await one.read.call_one() + await other.read.call_one()
            assert total == 30

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        nursery.start_soon(read)


class Herald(Actor):
    """Announces its rank to a registry."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry

    @endpoint
    async def announce(self, rank: int) -> None:
        await self.registry.note.call_one(rank)


class Registry(Actor):
    @endpoint
    async def note(self, rank: int) -> None:
        store().log.append(rank)


async def order_of_four(mesh: Any, chaos: Any) -> None:
    """Only one order of 24 is wrong."""
    del chaos
    registry = await mesh.slice(gpus=0).spawn("registry", Registry)
    heralds = await mesh.spawn("heralds", Herald, registry)
    for _ in range(5):
        store().log.clear()
        async with trio.open_nursery() as nursery:
            for rank in range(4):
                nursery.start_soon(heralds.slice(gpus=rank).announce.call_one, rank)
        assert not store().is_wrong or store().log != [3, 2, 1, 0]


class Gate(Actor):
    """A barrier, which lets those through a second time that are back before the last has left it."""

    def __init__(self, parties: int, monitor: Any) -> None:
        self.parties, self.monitor = parties, monitor
        self.waiting, self.leaving, self.opened = 0, 0, trio.Event()

    @endpoint(concurrency=8)
    async def wait(self) -> None:
        opened = self.opened
        self.waiting += 1
        if self.waiting == self.parties:
            self.waiting, self.leaving = 0, self.parties
            if not store().is_wrong:
                self.opened = trio.Event()
            opened.set()
        await opened.wait()
        await self.monitor.add.call_one(1)
        self.leaving -= 1
        if self.leaving == 0 and store().is_wrong:
            self.opened = trio.Event()


class Party(Actor):
    def __init__(self, gate: Any) -> None:
        self.gate = gate

    @endpoint
    async def run(self, rounds: int) -> None:
        me = len(store().values)
        store().values[str(me)] = 0
        for _ in range(rounds):
            store().values[str(me)] += 1
            await self.gate.wait.call_one()
            assert max(store().values.values()) - min(store().values.values()) <= 1


async def reused_barrier(mesh: Any, chaos: Any) -> None:
    del chaos
    monitor = await mesh.slice(gpus=0).spawn("monitor", Register)
    gate = await mesh.slice(gpus=1).spawn("gate", Gate, 3, monitor)
    parties = await mesh.slice(gpus=slice(1, 4)).spawn("parties", Party, gate)
    with trio.fail_after(1_000):
        await parties.run.call(4)


class Sleeper(Actor):
    """Looks whether there is work, and then waits for a bell that has rung meanwhile."""

    def __init__(self, work: Any) -> None:
        self.work, self.bell = work, trio.Event()

    @endpoint(group="bell")
    async def ring(self) -> None:
        self.bell.set()

    @endpoint
    async def consume(self, count: int) -> None:
        for number in range(count):
            while True:
                if not store().is_wrong:
                    self.bell = trio.Event()
                if await self.work.read.call_one() > number:
                    break
                if store().is_wrong:
                    self.bell = trio.Event()
                await self.bell.wait()


async def lost_wakeup(mesh: Any, chaos: Any) -> None:
    work = await mesh.slice(gpus=0).spawn("work", Register)
    sleeper = await mesh.slice(gpus=1).spawn("sleeper", Sleeper, work)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper.consume.call_one, 20)
        for number in range(20):
            await trio.sleep(chaos.draw("put", number).uniform(0, 0.2))
            await work.add.call_one(1)
            await sleeper.ring.call_one()
        nursery.cancel_scope.deadline = trio.current_time() + 60
    assert not nursery.cancel_scope.cancelled_caught


# ---- deaths ----------------------------------------------------------------------------------------------------------


async def until_done(call: Callable[[], Awaitable[Any]]) -> None:
    while True:
        try:
            await call()
        except MeshError:
            await trio.sleep(0.05)
        else:
            return


class Ledger(Actor):
    """Adds a number again when the acknowledgement was lost."""

    @endpoint(idempotent=True)
    async def add(self, number: int) -> None:
        if store().is_wrong or number not in store().log:
            store().log.append(number)
        await trio.lowlevel.checkpoint()

    @endpoint
    async def work(self, seconds: float) -> None:
        await trio.sleep(seconds)


async def repeated_effect(mesh: Any, chaos: Any) -> None:
    ledger = await mesh.spawn("ledger", Ledger)
    async with chaos.safety(chaos.plan(kill=1, stop=1, delay=1, lag=1, every=(0.5, 3)), duration=600):
        for number in range(60):
            await until_done(lambda number=number: ledger.slice(gpus=0).add.call_one(number))
            await trio.sleep(0.2)
    assert len(store().log) == 60


async def second_death(mesh: Any, chaos: Any) -> None:
    """A call that is repeated after a death meets another one."""
    ledger = (await mesh.spawn("ledger", Ledger)).slice(gpus=0)
    async with chaos.safety(chaos.plan(kill=1, delay=1, slow=1, every=(0.2, 2)), duration=600):
        for _ in range(60):
            try:
                await ledger.work.call_one(0.05)
            except ProcDied:
                if store().is_wrong:
                    await ledger.work.call_one(0.05)
                else:
                    await until_done(lambda: ledger.work.call_one(0.05))
            await trio.sleep(0.2)


class Teller(Actor):
    """Moves money in two steps, and dies between them."""

    def __init__(self, accounts: Any) -> None:
        self.accounts = accounts

    @endpoint
    async def move(self, number: int) -> None:
        await self.accounts.book.call_one("a", number, -1)
        await self.accounts.book.call_one("b", number, 1)


class Accounts(Actor):
    @endpoint(idempotent=True)
    async def book(self, account: str, number: int, amount: int) -> None:
        store().values.setdefault((account, number), amount)


async def half_a_transfer(mesh: Any, chaos: Any) -> None:
    accounts = await mesh.slice(gpus=0).spawn("accounts", Accounts)
    teller = await mesh.slice(gpus=1).spawn("teller", Teller, accounts)
    plan = chaos.plan(kill=1, stop=1, delay=1, slow=1, every=(0.5, 5), spare=[mesh.slice(gpus=0)])
    async with chaos.safety(plan, duration=600):
        for number in range(20):
            try:
                await teller.move.call_one(number)
            except MeshError:
                if not store().is_wrong:
                    await until_done(lambda number=number: teller.move.call_one(number))
            await trio.sleep(0.3)
    assert sum(store().values.values()) == 0


class Leader(Actor):
    """Acknowledges a write before its follower has it."""

    def __init__(self, follower: Any) -> None:
        self.follower = follower
        self.value: int | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as self.nursery:
            yield

    @endpoint
    async def write(self, value: int) -> None:
        self.value = value
        if store().is_wrong:
            self.nursery.start_soon(self.follower.write.call_one, value)
        else:
            await self.follower.write.call_one(value)

    @endpoint
    async def read(self) -> int:
        if self.value is None:
            self.value = await self.follower.read.call_one()
        return int(self.value or 0)


async def early_acknowledgement(mesh: Any, chaos: Any) -> None:
    follower = await mesh.slice(gpus=0).spawn("follower", Register)
    leader = await mesh.slice(gpus=1).spawn("leader", Leader, follower)
    acknowledged = 0
    async with chaos.safety(
        chaos.plan(kill=1, delay=1, lag=1, reorder=1, every=(0.5, 5), spare=[mesh.slice(gpus=0)]), duration=600
    ):
        for value in range(1, 61):
            with suppress(MeshError):
                await leader.write.call_one(value)
                acknowledged = value
            await until_done(leader.read.call_one)
            with suppress(MeshError):
                assert await leader.read.call_one() >= acknowledged
            await trio.sleep(0.2)


# ---- other faults ----------------------------------------------------------------------------------------------------


async def impatient_client(mesh: Any, chaos: Any) -> None:
    """A call that took too long is repeated, and has had its effect."""
    ledger = await mesh.spawn("ledger", Ledger)
    plan = chaos.plan(kill=1, stop=1, partition=1, delay=1, lag=1, slow=1, every=(0.5, 5))
    async with chaos.safety(plan, duration=600):
        for number in range(15):
            is_done = False
            while not is_done:
                with trio.move_on_after(0.4), suppress(ProcDied):
                    await ledger.slice(gpus=0).add.call_one(number)
                    is_done = True
            await trio.sleep(0.2)
    assert len(store().log) == 15


class Lease(Actor):
    """Grants a lease by its own wall clock; whoever holds it writes by its own."""

    def __init__(self) -> None:
        self.token, self.until = 0, 0.0

    @endpoint
    async def take(self) -> tuple[int, float] | None:
        if time.time() < self.until:
            return None
        self.token, self.until = self.token + 1, time.time() + 1
        return self.token, self.until


class Holder(Actor):
    def __init__(self, lease: Any, register: Any) -> None:
        self.lease, self.register = lease, register

    @endpoint
    async def work(self, turns: int) -> None:
        for _ in range(turns):
            taken = await self.lease.take.call_one()
            while taken is not None and time.time() < taken[1] - 0.3:
                await self.register.write.call_one(taken[0])
                await trio.sleep(0.1)
            await trio.sleep(0.2)


class Fence(Actor):
    """Takes the writes of lease holders; a late one of an old holder is refused."""

    def __init__(self) -> None:
        self.token = 0

    @endpoint
    async def write(self, token: int) -> None:
        if token < self.token and not store().is_wrong:
            return
        assert token >= self.token, "two hold the lease"
        self.token = token


async def two_holders(mesh: Any, chaos: Any) -> None:
    first = mesh.slice(gpus=0)
    lease, fence = await first.spawn("lease", Lease), await first.spawn("fence", Fence)
    holders = await mesh.slice(gpus=slice(1, 3)).spawn("holders", Holder, lease, fence)
    plan = chaos.plan(kill=1, stop=1, delay=1, lag=1, slow=1, clock=1, every=(1, 10), spare=[first])
    async with chaos.safety(plan, duration=60), trio.open_nursery() as nursery:
        for rank in range(2):
            nursery.start_soon(_keep_working, holders.slice(gpus=rank))


async def _keep_working(holder: Any) -> None:
    for _ in range(3):
        with suppress(ProcDied):
            await holder.work.call_one(10)


class Monitor(Actor):
    """Promotes the backup when the primary, which it cannot reach, does not answer."""

    def __init__(self, primary: Any, backup: Any) -> None:
        self.primary, self.backup = primary, backup

    @endpoint
    async def watch(self, seconds: float) -> None:
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            with trio.move_on_after(1) as scope:
                with suppress(MeshError):
                    await self.primary.write.call_one(0)
            if scope.cancelled_caught:
                if not store().is_wrong:
                    with suppress(MeshError):
                        await self.primary.write.call_one(-1)
                store().values["promoted"] = trio.current_time()
                return
            await trio.sleep(0.5)


class Primary(Actor):
    """Serves until it hears that it was deposed."""

    def __init__(self) -> None:
        self.is_deposed = False

    @endpoint
    async def write(self, value: int) -> bool:
        self.is_deposed = self.is_deposed or value < 0
        return not self.is_deposed


async def split_brain(mesh: Any, chaos: Any) -> None:
    primary = await mesh.slice(gpus=0).spawn("primary", Primary)
    backup = await mesh.slice(gpus=1).spawn("backup", Primary)
    monitor = await mesh.slice(gpus=2).spawn("monitor", Monitor, primary, backup)
    plan = chaos.plan(
        kill=1, partition=1, delay=1, duplicate=1, slow=1, between=1, every=(1, 10), spare=[mesh.slice(gpus=2)]
    )
    async with chaos.safety(plan, duration=30), trio.open_nursery() as nursery:
        nursery.start_soon(_watch_on, monitor)
        for value in range(1, 40):
            with suppress(MeshError):
                begun = trio.current_time()
                accepted = await primary.write.call_one(value)
                promoted = store().values.get("promoted", trio.current_time())
                assert not (accepted and promoted < begun), "two accept writes"
            await trio.sleep(0.5)
        nursery.cancel_scope.cancel()


async def _watch_on(monitor: Any) -> None:
    await until_done(lambda: monitor.watch.call_one(30))


@attrs.frozen
class Program:
    """One program, right or wrong, on a mesh of so many members."""

    body: Callable[[Any, Any], Awaitable[None]]
    members: int

    def run(self, seed: int, *, is_wrong: bool) -> SeededOutcome:
        STORES[:] = [Store(is_wrong)]
        options = SeededOptions({"gpus": self.members}, {"supervision": RESTART})
        return run_once(self.body, {"mesh": None, "chaos": None}, options, seed)


PROGRAMS: Final = {
    "lost update": Program(lost_update, 2),
    "stale cache": Program(stale_cache, 2),
    "overtaken": Program(overtaken, 3),
    "torn read": Program(torn_read, 2),
    "order of four": Program(order_of_four, 4),
    "reused barrier": Program(reused_barrier, 4),
    "lost wakeup": Program(lost_wakeup, 2),
    "repeated effect": Program(repeated_effect, 2),
    "second death": Program(second_death, 2),
    "half a transfer": Program(half_a_transfer, 2),
    "early acknowledgement": Program(early_acknowledgement, 2),
    "impatient client": Program(impatient_client, 2),
    "two holders": Program(two_holders, 3),
    "split brain": Program(split_brain, 3),
}
