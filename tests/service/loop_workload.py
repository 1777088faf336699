"""The whole loop by chance: pool, slots, replay buffer and publications under kills, stalls, partitions and resizes.

Its rules, which name what they find:

- LW-1: each request ends once, by its value, or by an error that something explains.
- LW-2: each sample is trained once at most, and is one that was made; the counts of the buffer close at every moment.
- LW-3: nothing is trained more than the staleness after its lease, and leases keep within the slots.
- LW-4: work that begins under a lease is done with weights of its version, or newer ones.
- LW-5: no version is torn: all of what a reader gets is of one version.
- LW-6: what is pinned stays as it is until it is let go.
- LW-7: once faults are healed, every worker gets leases, and versions are trained, within a bound of virtual time.
- LW-8: when all is over the counts of slots and pool close, and nothing is held for anybody.
- LW-9: what an actor is told of its `add` is so: stored if it returned, and at most once.
- LW-10: a version that is pinned is read to the end of the pin, though its trainer has died meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import attrs
import numpy
import trio

from trimesh import Actor, Backoff, LinkLost, ProcDied, RemoteCancelled, Restart, Unresponsive, endpoint
from trimesh._runtime.life.current import current_proc
from trimesh.errors import leaves
from trimesh.ids import ProcId
from trimesh.rdma import Published, VersionGone
from trimesh.service import Paused, open_pool, open_replay, open_slots
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

R = TypeVar("R")

GENERATORS = 3
RANKS = GENERATORS + 2
"""One trains, one makes samples by handles."""

BATCH, STALENESS, WORKERS = 3, 1, 5
VERSIONS = 10
"""Trained while faults come; half as many again after that."""

CONCURRENCY, QUEUE = 2, 4
ELEMENTS = 5_000
"""Two tensors of these are more than what is copied when a version is pinned: they are read where they lie."""
WITHIN = 300.0
"""Seconds of virtual time in which the healed loop trains its last versions."""

HEALED = Restart("one_for_one", intensity=10_000, period=60, backoff=Backoff(0.2, cap=1))
STATES = (
    "a request died",
    "a roller died",
    "the trainer died",
    "an abort",
    "a reader was late",
    "a stale sample",
    "a pin has outlived the trainer",
)
PASSING = (ProcDied, LinkLost, Unresponsive, trio.ClosedResourceError, VersionGone)


@attrs.define(eq=False)
class Ledger:
    """What has happened where. Simulated processes share this process, so it sees all of them."""

    breaches: list[str] = attrs.field(factory=list[str])
    born: dict[int, int] = attrs.field(factory=dict[int, int])
    trained: Counter[int] = attrs.field(factory=Counter[int])
    returned: set[int] = attrs.field(factory=set[int])
    leases: Counter[str] = attrs.field(factory=Counter[str])
    asked: int = 0
    ended: int = 0

    def breach(self, rule: str, text: str) -> None:
        self.breaches.append(f"{rule}: {text}")


LEDGERS: list[Ledger] = []
"""Of the run; the last one is the current."""


class Trainer(Actor):
    def __init__(self) -> None:
        self.published = Published(slots=3)
        self.version = 0

    @endpoint(idempotent=True)
    async def step(self, version: int) -> None:
        """Publish two tensors that say which version they are."""
        if version > self.version:
            await trio.sleep(0.2)
            await self.published.publish({name: numpy.full(ELEMENTS, float(version)) for name in ("left", "right")})
            self.version = version

    @endpoint(group="weights", concurrency=8, idempotent=True)
    async def publication(self) -> Published:
        return self.published


def version_of(tensors: dict[str, Any]) -> int:
    """Return the version of what was read."""
    values = numpy.concatenate([tensors["left"], tensors["right"]])
    if (values != values[0]).any():
        LEDGERS[-1].breach("LW-5", f"a reader got {sorted(set(values.tolist()))} at once")
    return int(values[0])


class Generator(Actor):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.weights = {name: numpy.zeros(ELEMENTS) for name in ("left", "right")}

    @endpoint(group="pulls", idempotent=True)
    async def pull(self, version: int) -> None:
        while version_of(self.weights) < version:
            published = await self.trainer.publication.call_one()
            async with published.pin() as snapshot:
                fresh = {name: numpy.zeros(ELEMENTS) for name in self.weights}
                await snapshot.read_into(fresh)
            self.weights = fresh

    @endpoint(concurrency=CONCURRENCY, group="work")
    async def generate(self, number: int, version: int, seconds: float) -> int:
        if version_of(self.weights) < version:
            await self.pull(version)  # this process has just been started
        LEDGERS[-1].born[number] = version_of(self.weights)
        await trio.sleep(seconds)
        if number % 11 == 3:
            raise ValueError(number)
        return number


class Roller(Actor):
    @endpoint(concurrency=4)
    async def roll(self, pool: Any, slots: Any, buffer: Any, number: int, seconds: float) -> None:
        async with slots.lease() as lease:
            LEDGERS[-1].leases["roller"] += 1
            await pool.generate(number, lease.version, seconds)
            await buffer.add((number, lease.version), version=lease.version)
            LEDGERS[-1].returned.add(number)


async def until_done(work: Callable[[], Awaitable[R]], on_failure: Callable[[], object] = lambda: None) -> R:
    """Do something again until processes and links are there for it."""
    while True:
        try:
            return await work()
        except Exception as error:
            if not all(isinstance(leaf, PASSING) for leaf in leaves(error)):
                raise
            on_failure()
            await trio.sleep(0.2)


@attrs.define(eq=False)
class Loop:
    mesh: Any
    chaos: Any
    ledger: Ledger
    trainer: Any
    generators: Any
    roller: Any
    pool: Any
    slots: Any
    buffer: Any
    version: int = 0

    async def work(self, worker: int) -> None:
        """Make samples for ever."""
        step = 0
        while True:
            step += 1
            dice = self.chaos.draw("worker", worker, step)
            number = worker * 10_000 + step
            if worker == 0:
                await self.have_rolled(number, dice.uniform(0.01, 1.0))
                continue
            try:
                async with self.slots.lease() as lease:
                    self.ledger.leases[f"worker {worker}"] += 1
                    if not await self.ask(number, lease.version, dice):
                        raise LookupError("no sample")
                    await self.buffer.add((number, lease.version), version=lease.version)
                    self.ledger.returned.add(number)
            except LookupError:
                await trio.sleep(0.01)

    async def have_rolled(self, number: int, seconds: float) -> None:
        try:
            await self.roller.roll.call_one(self.pool, self.slots, self.buffer, number, seconds)
        except Exception as error:
            if not all(isinstance(one, (*PASSING, ValueError, Paused, RemoteCancelled)) for one in leaves(error)):
                raise
            if isinstance(error, ProcDied):
                self.chaos.sometimes("a roller died")
            await trio.sleep(0.05)

    async def ask(self, number: int, version: int, dice: Any) -> bool:
        """Make a request; return whether there is a sample."""
        self.ledger.asked += 1
        try:
            with trio.move_on_after(dice.choice([0.3, 100.0])):
                some = self.pool.options(group=number % 5, priority=dice.choice([0, 0, 1]))
                found = await some.generate(number, version, dice.uniform(0.01, 1.0))
                if found != number or number % 11 == 3:
                    self.ledger.breach("LW-1", f"request {number} gave {found!r}")
                return True
        except Exception as error:
            if not all(isinstance(one, (*PASSING, ValueError, Paused, RemoteCancelled)) for one in leaves(error)):
                raise
            if isinstance(error, ProcDied):
                self.chaos.sometimes("a request died")
            if isinstance(error, Paused):
                self.chaos.sometimes("an abort")
        finally:
            self.ledger.ended += 1
        return False

    async def train(self, versions: int) -> None:
        """Train so many versions."""
        for _ in range(versions):
            await self.train_one(self.version + 1)

    async def train_one(self, version: int) -> None:
        dice = self.chaos.draw("trainer", version)
        with suppress(LookupError):
            async with self.buffer.taking(BATCH):
                await trio.sleep(dice.uniform(0, 0.1))
                if dice.random() < 0.5:
                    await self.buffer.sample(1)  # waits while others add
                raise LookupError("this step has failed: its batch is there for the next one")
        async with self.buffer.taking(BATCH) as batch:
            await trio.sleep(dice.uniform(0, 0.3))
            await until_done(
                lambda: self.trainer.step.call_one(version), lambda: self.chaos.sometimes("the trainer died")
            )
        for number, begun in batch:
            self.ledger.trained[number] += 1
            if not 0 <= self.version - begun <= STALENESS:
                self.ledger.breach("LW-3", f"sample {number} of version {begun} is trained at {self.version}")
            if self.ledger.born[number] < begun:
                self.ledger.breach("LW-4", f"sample {number} of {begun} is of weights {self.ledger.born[number]}")
        self.pool.cancel(group=dice.randrange(5))
        async with self.pool.paused(dice.choice(["keep", "wait", "abort"])):
            await until_done(lambda: self.update(version))
        self.version = version
        await self.slots.advance(version=version)

    async def update(self, version: int) -> None:
        await self.trainer.step.call_one(version)  # one that was restarted has published nothing yet
        await self.generators.pull.call(version)

    async def read(self) -> None:
        """Pin versions, and look at them twice."""
        step = 0
        while True:
            step += 1
            dice = self.chaos.draw("reader", step)
            try:
                published = await self.trainer.publication.call_one()
                async with published.pin() as snapshot:
                    before = version_of(await snapshot.read())
                    await trio.sleep(dice.uniform(0, 3))
                    try:
                        after = version_of(await snapshot.read())
                    except ProcDied:
                        self.ledger.breach("LW-10", f"version {before} has gone with its trainer, pinned")
                        raise
                    if current_proc().death_of(ProcId(published._name[0])) is not None:
                        self.chaos.sometimes("a pin has outlived the trainer")
                    if before != after:
                        self.ledger.breach("LW-6", f"version {before} was {after} while it was pinned")
                    if after < self.version:
                        self.chaos.sometimes("a reader was late")
            except PASSING:
                await trio.sleep(0.2)

    async def disturb(self) -> None:
        """Resize, roll and cancel."""
        step = 0
        while True:
            step += 1
            dice = self.chaos.draw("disturber", step)
            await trio.sleep(dice.uniform(0.2, 2))
            match dice.choice(["resize", "roll", "cancel"]):
                case "resize":
                    await self.pool.resize(dice.choice([1, 2]))
                    await trio.sleep(dice.uniform(0, 1))
                    await self.pool.resize(GENERATORS)
                case "roll":
                    async with self.pool.rolling(at_most=dice.choice([1, 2])) as replicas:
                        async for _ in replicas:
                            await trio.sleep(dice.uniform(0, 0.3))
                case _:
                    self.pool.cancel_all(reason="new weights")

    async def look(self) -> None:
        """Look at what must hold at every moment."""
        while True:
            items, places, requests = self.buffer.statistics(), self.slots.statistics(), self.pool.statistics()
            if items.added != items.stored + items.held + items.taken + sum(items.evicted.values()):
                self.ledger.breach("LW-2", f"counts do not close: {items}")
            if items.evicted.get("stale"):
                self.chaos.sometimes("a stale sample")
            if max(items.stored + items.held, places.running) > places.capacity:
                self.ledger.breach("LW-3", f"slots are exceeded: {places}")
            if requests.queued > QUEUE + GENERATORS * CONCURRENCY:
                self.ledger.breach("LW-8", f"the queue has no bound: {requests}")
            await trio.sleep(0.05)

    def close(self) -> None:
        """Look at what must hold at the end."""
        ledger, items = self.ledger, self.buffer.statistics()
        twice = [number for number, count in ledger.trained.items() if count > 1]
        if twice or set(ledger.trained) - set(ledger.born):
            ledger.breach("LW-2", f"samples {twice} were trained twice")
        if items.taken < sum(ledger.trained.values()):
            ledger.breach("LW-2", f"{items.taken} items were taken, {ledger.trained.total()} trained")
        if items.added < len(ledger.returned):
            ledger.breach("LW-9", f"{len(ledger.returned)} adds have returned, {items.added} items were added")
        places, requests = self.slots.statistics(), self.pool.statistics()
        if places.begun != places.returned + places.handed_on or places.running or items.held:
            ledger.breach("LW-8", f"something is held: {places}, {items}")
        over = requests.succeeded + requests.failed + requests.cancelled + requests.refused
        if requests.made != over or requests.running or requests.queued or ledger.asked != ledger.ended:
            ledger.breach("LW-8", f"requests do not close: {requests}")


async def loop_workload(mesh: Any, chaos: Any) -> None:
    """Run it, and raise what broke a rule first."""
    ledger = Ledger()
    LEDGERS[:] = [ledger]
    trainer = await mesh.slice(gpus=GENERATORS).spawn("trainer", Trainer)
    roller = await mesh.slice(gpus=GENERATORS + 1).spawn("roller", Roller)
    generators = await mesh.slice(gpus=slice(GENERATORS)).spawn("generators", Generator, trainer)
    plan = chaos.plan(kill=4, stop=1, partition=1, lag=1, slow=1, delay=1, transfer=1, every=(0.2, 2), max_down=2)
    async with (
        open_slots(batch=BATCH, staleness=STALENESS) as slots,
        open_replay(capacity=50, slots=slots) as buffer,
        open_pool(generators, concurrency=CONCURRENCY, queue=QUEUE) as pool,
    ):
        loop = Loop(mesh, chaos, ledger, trainer, generators, roller, pool, slots, buffer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.look)
            for worker in range(WORKERS):
                nursery.start_soon(loop.work, worker)
            async with chaos.safety(plan, duration=3_000), trio.open_nursery() as faulty:
                faulty.start_soon(loop.disturb)
                faulty.start_soon(loop.read)
                await loop.train(VERSIONS)
                faulty.cancel_scope.cancel()
            async with chaos.liveness(within=WITHIN):
                before = Counter(ledger.leases)
                names = ["roller", *(f"worker {worker}" for worker in range(1, WORKERS))]
                while not all(ledger.leases[name] > before[name] for name in names):  # LW-7
                    await loop.train(1)
                await loop.train(VERSIONS // 2)
            nursery.cancel_scope.cancel()
        with trio.fail_after(WITHIN):
            while slots.statistics().running or buffer.statistics().held:  # noqa: ASYNC110 - of handles elsewhere
                await trio.sleep(0.1)
        loop.close()
    if ledger.breaches:
        raise AssertionError(ledger.breaches[0])


def run_schedule(seed: int, body: Callable[..., Any] = loop_workload) -> SeededOutcome:
    """Run one schedule, as the simulated test does."""
    options = SeededOptions({"gpus": RANKS}, {"supervision": HEALED})
    return run_once(body, {"mesh": None, "chaos": None}, options, seed)
