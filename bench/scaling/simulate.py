"""A cast over simulated processes: the real routing code, links that take time, and counters on every link.

Each process computes one thing after the other, for as long as `Costs` says for each message; each message is under way
for a hop. Nothing else takes (virtual) time, so what the clock shows is what the pattern of messages costs.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from bench.scaling.actors import open_cast
from bench.scaling.tree import Network, Shape
from trimesh._transport.in_memory.transport import Delivery
from trimesh._transport.interface import Lane
from trimesh.ids import ProcId
from trimesh.testing.simulated.host import World, open_world

CALLER = ProcId(1)
VALUE = 0.5
"""What is cast and answered: a float, nine bytes in a pickle."""


@dataclass(frozen=True)
class Simulated:
    """What one simulated cast has shown.

    Attributes:
        shape: Over what.
        messages, caller_messages, links_max, hops: As in `Counts`.
        caller_bytes: Bytes that the caller has sent and taken.
        seconds: From the cast to the last reply by the virtual clock.
        cpu_seconds: What simulating that one cast took.
        resident_bytes: The most memory that the simulation had.
    """

    shape: Shape
    messages: int
    caller_messages: int
    caller_bytes: int
    links_max: int
    hops: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int


@dataclass
class Wire(Delivery):
    """Charges each process for what it sends and takes, once `network` is set; counts messages and bytes.

    Attributes:
        world: The simulated processes.
        network: What things cost; None while nothing is to cost or to count.
        messages: Of each process, sent and taken.
        nbytes: Bytes of those.
        peers: Those that each process has exchanged a message with, from the start.
    """

    world: World
    network: Network | None = None
    messages: dict[ProcId, int] = field(default_factory=dict[ProcId, int])
    nbytes: dict[ProcId, int] = field(default_factory=dict[ProcId, int])
    peers: dict[ProcId, set[ProcId]] = field(default_factory=dict[ProcId, set[ProcId]])
    _busy_until: dict[ProcId, float] = field(default_factory=dict[ProcId, float])
    _leaders: set[ProcId] = field(default_factory=set[ProcId])

    def begin(self, network: Network) -> None:
        """Charge and count from here on."""
        self.network = network
        self._leaders = {self.owner_of(proc_id) for proc_id in self.world.children} - {CALLER}

    def owner_of(self, proc_id: ProcId) -> ProcId:
        """Return who has started a process."""
        owner = self.world.children[proc_id].owner
        return CALLER if owner is None else owner.proc_id

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        """Return until when the target has taken a message in."""
        del lane
        for end, peer in ((source, target), (target, source)):
            self.peers.setdefault(end, set()).add(peer)
        if self.network is None:
            return 0.0
        for end in (source, target):
            self.messages[end] = self.messages.get(end, 0) + 1
            self.nbytes[end] = self.nbytes.get(end, 0) + size
        child = source if source in self.world.children and self.owner_of(source) == target else target
        costs = self.network.costs
        is_remote = self.network.is_remote and (child in self._leaders or not self._leaders)
        hop = (costs.tcp_hop if is_remote else costs.hop) / 1e6
        now = trio.current_time()
        if child is target:
            if self._busy_until.get(source, 0.0) <= now:  # the first of those that it sends at once
                now += (costs.call if source == CALLER else costs.relay) / 1e6
            else:
                now = self._busy_until[source]
            now += (costs.send + costs.tcp_send * is_remote) / 1e6
            self._busy_until[source] = now
            return now + hop - trio.current_time()
        if source not in self._leaders:
            now += costs.work / 1e6
        took = costs.take + costs.tcp_take * is_remote + costs.byte * size
        now = max(now + hop, self._busy_until.get(target, 0.0)) + took / 1e6
        self._busy_until[target] = now
        return now - trio.current_time()

    def hops(self, proc_id: ProcId) -> int:
        """Return how many processes stand above one."""
        found = 0
        while proc_id != CALLER:
            proc_id, found = self.owner_of(proc_id), found + 1
        return found


@asynccontextmanager
async def _simulated(shape: Shape) -> AsyncIterator[tuple[Wire, Any]]:
    wires: list[Wire] = []

    def prepare(world: World) -> None:
        wires.append(Wire(world))
        world.network.delivery = wires[0]

    async with open_world(prepare, seed=1) as world, open_cast(shape) as (_, cast):
        assert len(world.children) == shape.processes
        yield wires[0], cast


async def _measure(shape: Shape, network: Network) -> Simulated:
    async with _simulated(shape) as (wire, cast):
        await cast(VALUE)  # definitions travel with the first
        wire.begin(network)
        start, cpu = trio.current_time(), time.process_time()
        answers = await cast(VALUE)
        seconds, cpu = trio.current_time() - start, time.process_time() - cpu
        assert answers == [VALUE] * shape.ranks
        found = Simulated(
            shape=shape,
            messages=sum(wire.messages.values()) // 2,
            caller_messages=wire.messages[CALLER],
            caller_bytes=wire.nbytes[CALLER],
            links_max=max(map(len, wire.peers.values())),
            hops=max(map(wire.hops, wire.world.children)),
            seconds=seconds,
            cpu_seconds=cpu,
            resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        )
        wire.network = None
    return found


def simulate(shape: Shape, network: Network) -> Simulated:
    """Simulate one cast, after one that is not counted."""
    gc.disable()  # its looks at millions of objects that all live would take most of the time
    try:
        return trio.run(_measure, shape, network, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        gc.enable()
        gc.collect()
