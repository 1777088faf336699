"""Random mixtures of verbs, cancels and deaths over simulated processes, and what must hold of each (C, E, S, X3).

Everything is drawn from the seed: what is called, how it ends, how long messages are under way, who is cancelled and
who dies. A failure is repeated by running its seed alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.meshes import Lag, SimBackend, check_calls
from tests.conformance.seeds import run_hundred

import trimesh
from trimesh import Actor, MeshErrorGroup, MeshStopped, ProcDied, RemoteCancelled, endpoint, limits
from trimesh._transport.interface import Lane
from trimesh.ids import ProcId

SEEDS = 30
PROCS = 4
TASKS = 10
MESSAGES = 8
ENDLESS = 1_000.0
SLOWEST = 1.5 * limits.CANCEL_ACK_SECONDS
"""An endpoint that unwinds as slowly as this is given up by its caller."""

Entry = tuple[int, int, str]
"""(rank, number of the message, what happened)."""

journal: list[Entry] = []
"""What happened in all simulated processes of the running seed, in order; they share this memory."""


class Planned(Exception):
    """Raised by an endpoint because the plan says so; carries the number of its message."""

    @property
    def number(self) -> int:
        return int(self.args[0])


class Ledger(Actor):
    """Does what a message says and writes it down."""

    async def do(self, number: int, how: str, seconds: float) -> int:
        rank = trimesh.current_rank()
        journal.append((rank, number, "started"))
        try:
            if how == "hold":
                await trio.sleep(ENDLESS)
            elif how != "at once":
                await trio.sleep(seconds)
        except trio.Cancelled:
            if how == "unwind slowly":
                with trio.CancelScope(shield=True):
                    await trio.sleep(seconds)
            journal.append((rank, number, "cancelled"))
            if how == "fail when cancelled":
                journal.append((rank, number, "raised"))
                raise Planned(number) from None
            raise
        if how == "fail":
            journal.append((rank, number, "raised"))
            raise Planned(number)
        journal.append((rank, number, "returned"))
        return number

    @endpoint
    async def one(self, number: int, how: str, seconds: float) -> int:
        return await self.do(number, how, seconds)

    @endpoint(concurrency=3)
    async def three(self, number: int, how: str, seconds: float) -> int:
        return await self.do(number, how, seconds)

    @endpoint(concurrency=TASKS)
    async def relay(self, target: Any, plan: Message) -> Any:
        return await plan.send(target)


@attrs.frozen
class Message:
    """One use of a verb."""

    number: int
    endpoint: str
    verb: str
    ranks: tuple[int, ...]
    how: str
    seconds: float
    deadline: float | None
    via: int | None

    async def send(self, ledgers: Any) -> Any:
        """Use the verb on the ranks that are meant."""
        view = ledgers.exclude([{"n": rank} for rank in range(PROCS) if rank not in self.ranks])
        done = getattr(getattr(view, self.endpoint), self.verb)(self.number, self.how, self.seconds)
        return done if self.verb == "broadcast_nowait" else await done


@attrs.define(eq=False)
class Ending:
    """What a message has come to at its sender; exactly one of the attributes is set in the end."""

    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    count: int = 0


class Plan:
    """All that happens under one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = iter(range(10_000))
        self.kill_at = self.random.uniform(0, 8) if self.random.random() < 0.4 else None
        self.victim = self.random.randrange(PROCS)
        self.leave_at = self.random.choice([5.0, 30.0, 2 * ENDLESS])
        self.tasks = [[self.message() for _ in range(MESSAGES)] for _ in range(TASKS)]
        self.pauses = [[self.random.choice([0, 0, 0.1, 1]) for _ in range(MESSAGES)] for _ in range(TASKS)]

    def message(self) -> Message:
        draw = self.random
        verb = draw.choice(["call", "call", "call_settled", "call_one", "choose", "broadcast", "broadcast_nowait"])
        count = 1 if verb == "call_one" else draw.randint(1, PROCS)
        how = draw.choice(
            ["at once", "at once", "a while", "a while", "hold", "fail", "fail when cancelled", "unwind slowly"]
        )
        if verb.startswith("broadcast") and how in ("hold", "fail", "fail when cancelled"):
            how = draw.choice(["a while", "a while", "a while", "fail"])
        deadline = draw.uniform(0, 3) if how == "hold" or draw.random() < 0.3 else None
        via = draw.randrange(PROCS) if draw.random() < 0.3 else None
        ranks = tuple(sorted(draw.sample(range(PROCS), count)))
        name = draw.choice(["one", "three"])
        seconds = draw.uniform(0, SLOWEST if how == "unwind slowly" else 2)
        return Message(next(self.numbers), name, verb, ranks, how, seconds, deadline, via)


class Jitter(Lag):
    """Messages are under way for random times; a lane stays first in, first out."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.random = draw
        self.most = draw.choice([0.0, 0.0, 0.2])

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        del source, target, lane, size
        return self.random.uniform(0, self.most) if self.most else 0.0


@attrs.define(eq=False)
class Run:
    """One seed on its way."""

    plan: Plan
    backend: SimBackend
    endings: dict[int, Ending] = attrs.field(factory=lambda: defaultdict(Ending))
    killed: bool = False
    tasks_left: int = TASKS
    all_sent: trio.Event = attrs.field(factory=trio.Event)

    async def send(self, ledgers: Any, message: Message) -> None:
        """Send one message and note its ending."""
        ending = self.endings[message.number]
        scope = trio.CancelScope()
        if message.deadline is not None:
            scope.deadline = trio.current_time() + message.deadline
        try:
            with scope:
                if message.via is None:
                    ending.value = await message.send(ledgers)
                else:
                    ending.value = await ledgers.slice(n=message.via).relay.call_one(ledgers, message)
        except Exception as error:  # noqa: BLE001 - judged afterwards
            ending.error = error
        finally:
            ending.cancelled = scope.cancelled_caught
            ending.count += 1

    async def task(self, ledgers: Any, index: int) -> None:
        """Send the messages of one task, one after the other."""
        for message, pause in zip(self.plan.tasks[index], self.plan.pauses[index], strict=True):
            await self.send(ledgers, message)
            await trio.sleep(pause)
        self.tasks_left -= 1
        if not self.tasks_left:
            self.all_sent.set()

    async def kill(self, procs: Any) -> None:
        """Let one process die."""
        assert self.plan.kill_at is not None
        await trio.sleep(self.plan.kill_at)
        self.killed = True
        self.backend.kill(procs, self.plan.victim)

    async def block(self, outside: trio.Nursery) -> None:
        """The mesh, with one half of the tasks in its body and the other half elsewhere."""
        async with self.backend.procs({"n": PROCS}) as procs:
            ledgers = await procs.spawn("ledgers", Ledger)
            for index in range(TASKS // 2, TASKS):
                outside.start_soon(self.task, ledgers, index)
            if self.plan.kill_at is not None:
                outside.start_soon(self.kill, procs)
            with trio.move_on_after(self.plan.leave_at):
                async with trio.open_nursery() as inside:
                    for index in range(TASKS // 2):
                        inside.start_soon(self.task, ledgers, index)
                await self.all_sent.wait()
                await trio.sleep(SLOWEST + 1)
                for child in self.backend.world.children.values():
                    if child.report is None:
                        check_calls(self.backend.world.proc(child.proc_id))


# ---- what must hold --------------------------------------------------------------------------------------------------


def check_at_most_once() -> None:
    """S02: no message runs twice on one rank, and what started has ended in one way."""
    per_message: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, number, what in journal:
        per_message[rank, number].append(what)
    for key, found in per_message.items():
        assert found.count("started") == 1, (key, found)
        assert len([what for what in found if what in ("returned", "cancelled")]) <= 1, (key, found)


def check_order(plan: Plan, endings: dict[int, Ending]) -> None:
    """S01: messages of one task to one slot of one actor start in the order in which they were sent."""
    del endings
    for task in plan.tasks:
        sent = [message.number for message in task if message.endpoint == "one"]
        for rank in range(PROCS):
            for via in (None, *range(PROCS)):
                mine = [m.number for m in task if m.number in sent and m.via == via]
                started = [n for r, n, what in journal if r == rank and n in mine and what == "started"]
                assert started == sorted(started), (rank, via, started)


def check_endings(run: Run) -> None:
    """Every message ends in exactly one way, and the way is one that something explains."""
    stopped = (MeshStopped, RemoteCancelled, ProcDied)
    for task in run.plan.tasks:
        for message in task:
            ending = run.endings.get(message.number)
            if ending is None:
                continue  # its task was cancelled with the block before its turn
            assert ending.count == 1
            leaves = list(trimesh.leaves(ending.error)) if ending.error is not None else []
            for leaf in leaves:
                if isinstance(leaf, Planned):
                    assert leaf.number == message.number
                    assert message.how in ("fail", "fail when cancelled")
                elif isinstance(leaf, trio.WouldBlock):
                    assert message.verb == "broadcast_nowait"
                elif isinstance(leaf, trimesh.Unresponsive):
                    assert message.how == "unwind slowly"
                else:
                    assert isinstance(leaf, stopped), repr(leaf)
            if ending.error is None and not ending.cancelled and ending.value is not None:
                check_value(message, ending.value)
            if message.verb == "call" and message.via is None and ending.error is not None:
                assert isinstance(ending.error, MeshErrorGroup)


def check_value(message: Message, value: Any) -> None:
    """What came back is of this message, and of a rank that returned it."""
    returned = {rank for rank, number, what in journal if number == message.number and what == "returned"}
    if message.verb == "call":
        assert list(value.values()) == [message.number] * len(message.ranks)
        assert returned == set(message.ranks)
    elif message.verb == "call_settled":
        for outcome in value.values():
            assert outcome.ok or isinstance(outcome.error, Planned | MeshStopped | RemoteCancelled | ProcDied)
    else:
        assert value == message.number
        assert returned <= set(message.ranks)
        assert len(returned) == 1


def check_no_error_is_lost(run: Run, raised_by_block: BaseException | None) -> None:
    """E10, E08: what an endpoint raised came out of the block, if no caller waited for it, or of its call."""
    block = {leaf.number for leaf in leaves_of(raised_by_block) if isinstance(leaf, Planned)}
    messages = {message.number: message for task in run.plan.tasks for message in task}
    for rank, number, what in journal:
        message = messages[number]
        if what != "raised" or (run.killed and run.plan.victim in (rank, message.via)):
            continue
        if message.verb.startswith("broadcast"):
            assert number in block, f"the broadcast {number} raised on rank {rank}, its block did not"
        elif message.via is None:
            ending = run.endings[number]
            told = any(isinstance(leaf, Planned) for leaf in leaves_of(ending.error))
            if message.verb == "call_settled":
                told = ending.value is not None or ending.cancelled or ending.error is None
            assert told, f"message {number} raised on rank {rank}, its call ended in {ending!r}"


def leaves_of(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else list(trimesh.leaves(error))


def check_block(run: Run, error: BaseException | None) -> None:
    """X3: a death is told once; nothing else comes out of the block than deaths and what broadcasts raised."""
    leaves = leaves_of(error)
    deaths = [leaf for leaf in leaves if isinstance(leaf, ProcDied) and leaf.by != "grace"]
    assert len(deaths) <= 1
    if deaths:
        assert run.killed
        assert trimesh.origin(deaths[0]).point == {"n": run.plan.victim}
    for leaf in leaves:
        assert isinstance(leaf, Planned | ProcDied), repr(leaf)


@pytest.mark.seeds(SEEDS)
def test_random_run_keeps_the_promises(seed: int):
    """C01-C03, C09, C11, C12, E01-E03, E08, E10, E13, S01, S02, S07, S08, X1, X3."""
    run_seed(seed)


@pytest.mark.stress
@pytest.mark.parametrize("hundred", range(2, 52))
def test_many_random_runs_keep_the_promises(hundred: int):
    """The same for 5,000 more seeds."""
    run_hundred(hundred, run_seed)


def run_seed(seed: int) -> None:
    """Run one seed and judge it."""
    journal.clear()
    plan = Plan(seed)
    backend = SimBackend(seed)
    backend.lag = Jitter(random.Random(seed))
    run = Run(plan, backend)
    error: BaseException | None = None

    async def main() -> None:
        nonlocal error
        async with backend.open():
            async with trio.open_nursery() as outside:
                try:
                    await run.block(outside)
                except MeshErrorGroup as group:
                    error = group
            await backend.check_clean()

    backend.run(main)
    check_at_most_once()
    check_order(plan, run.endings)
    check_endings(run)
    check_no_error_is_lost(run, error)
    check_block(run, error)
