"""A replicated log with elections, whose last entry is a register; a leader needs a majority for each operation.

Planted bugs: "early" acknowledges before a majority has the entry; "old_log" lets a node lead
that misses entries; "old_term" stores for leaders of earlier terms; "stale" reads without a majority.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any, Final

import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import History, Model

BUGS: Final = ("early", "old_log", "old_term", "stale")
NODES: Final = 3
ANSWER_SECONDS: Final = 0.3

Log = tuple[tuple[int, Any], ...]


class NoLeader(Exception):
    """The node does not lead: nothing was done."""


class NoMajority(Exception):
    """The operation may be done later."""


class Node(Actor):
    """One replica."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.term = 0
        self.leads = 0
        self.log: Log = ((0, None),)

    @asynccontextmanager
    async def lifespan(self):
        async with trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()

    @endpoint
    async def meet(self, nodes: Any) -> None:
        own = trimesh.context().point["gpus"]
        self.others = [nodes.slice(gpus=rank) for rank in range(NODES) if rank != own]

    @endpoint(concurrency=8)
    async def vote(self, term: int) -> Log | None:
        if term > self.term:
            self.term = term
            return self.log
        return None

    @endpoint(concurrency=8)
    async def store(self, term: int, log: Log) -> bool:
        if term < self.term and self.bug != "old_term":
            return False
        if term == self.log[-1][0] and len(log) < len(self.log):
            return True  # a late message of this leader
        self.term, self.log = max(term, self.term), log
        return True

    @endpoint(concurrency=8)
    async def elect(self) -> None:
        self.term += 1
        term = self.term
        logs = [self.log, *(log for log in await self._ask("vote", term) if log is not None)]
        if len(logs) * 2 > NODES and self.term == term:
            newest = self.log if self.bug == "old_log" else max(logs, key=lambda log: (log[-1][0], len(log)))
            self.log, self.leads = (*newest, (term, newest[-1][1])), term

    @endpoint(concurrency=8)
    async def write(self, value: Any) -> None:
        self._check_leads()
        self.log = (*self.log, (self.term, value))
        if self.bug == "early":
            self.nursery.start_soon(self._replicate, self.log)
        else:
            await self._agree()

    @endpoint(concurrency=8)
    async def read(self) -> Any:
        self._check_leads()
        value = self.log[-1][1]
        if self.bug != "stale":
            await self._agree()
        return value

    def _check_leads(self) -> None:
        if self.leads != self.term:
            raise NoLeader

    async def _agree(self) -> None:
        if not await self._replicate(self.log):
            raise NoMajority

    async def _replicate(self, log: Log) -> bool:
        term = self.leads
        return (1 + sum(await self._ask("store", term, log))) * 2 > NODES and self.term == term

    async def _ask(self, name: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = []
        is_enough = trio.Event()

        async def ask(other: Any) -> None:
            answers.append(await getattr(other, name).call_one(*arguments))
            if answers[-1] or len(answers) == len(self.others):
                is_enough.set()

        for other in self.others:  # not in a nursery here: the cancel of a call waits for its member
            self.nursery.start_soon(ask, other)
        with trio.move_on_after(ANSWER_SECONDS):
            await is_enough.wait()
        return [*answers]


async def run(mesh: Any, chaos: Any, bug: str) -> None:
    """Write and read under partitions, with elections after failures and by chance; the log must be one register."""
    nodes = await mesh.slice(gpus=slice(0, NODES)).spawn("nodes", Node, bug)
    await nodes.meet.call(nodes)
    history = History()
    bounds = {"between": (0.2, 1.5), "lag": (0.1, 1.0)}
    plan = chaos.plan(between=3, lag=1, every=(0.05, 0.3), max_down=2, bounds=bounds)

    async def client(name: str) -> None:
        leader = 0
        for number in range(10):
            await trio.sleep(chaos.draw(name, number).uniform(0, 0.1))
            call = ("read",) if number % 2 else ("write", f"{name}{number}")
            with history.invoke(name, *call) as operation, trio.move_on_after(1):
                try:
                    operation.ok(await getattr(nodes.slice(gpus=leader), call[0]).call_one(*call[1:]))
                except NoLeader:
                    operation.fail()
                except NoMajority:
                    operation.unknown()
            if operation.operation.status != "ok" or chaos.draw(name, number, "moves").random() < 0.2:
                leader = chaos.draw(name, number, "leader").randrange(NODES)
                with trio.move_on_after(1):
                    await nodes.slice(gpus=leader).elect.call_one()

    async with chaos.safety(plan, duration=20, of=mesh.slice(gpus=slice(0, NODES))), trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(client, name)
    history.check(Model.register())
