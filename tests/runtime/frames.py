"""A link that keeps what is sent, decoded, and calls that come from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from trimesh._routing.collector import ReceiveCount
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._transport.in_memory.mover import MemoryMover, MemoryTable
from trimesh._transport.interface import Buffer, Lane, Link, LinkGroup, LinkHandler, LinkStatistics, Mover, Transport
from trimesh._wire import messages
from trimesh.ids import ProcId


@attrs.define(eq=False)
class RecordingLink(Link):
    """Keeps every message in the order in which it was sent."""

    sent: list[Any] = attrs.field(factory=list)
    bodies: list[list[bytes]] = attrs.field(factory=list)
    lanes: list[Lane] = attrs.field(factory=list)
    aborted: bool = False
    lent: trio.Event | None = None
    heirs: list[Link | None] = attrs.field(factory=list)

    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        self.sent.append(messages.decode(head))
        self.bodies.append([bytes(body) for body in bodies])
        self.lanes.append(lane)
        return self.lent

    def close(self) -> None:
        self.aborted = True

    def abort(self) -> None:
        self.aborted = True

    def hand_over(self, heir: Link | None) -> bool:
        self.heirs.append(heir)
        return super().hand_over(heir)

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(0, 0, 0, 0, 0, 0)

    def terminals(self) -> list[Any]:
        """Return what ends calls."""
        ends = messages.Return | messages.Error | messages.CancelAck | messages.Refused
        return [message for message in self.sent if isinstance(message, ends)]


@attrs.define(eq=False)
class RecordingGroup(LinkGroup):
    """Sends to each of its links and counts the casts."""

    links: tuple[RecordingLink, ...]
    casts: int = 0

    def cast(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int = 0) -> trio.Event | None:
        self.casts += 1
        for link in self.links:
            link.send(head, bodies)
        return self.links[0].lent

    def close(self) -> None:
        self.links = ()


@attrs.define(eq=False)
class RecordingTransport(Transport):
    """Makes groups of recording links; nothing comes in but what a test injects."""

    groups: list[RecordingGroup] = attrs.field(factory=list)
    memory: Mover = attrs.field(factory=lambda: MemoryMover(ProcId(1), MemoryTable()))
    comes: list[Callable[[], object]] = attrs.field(factory=list)
    """What `wait_here` hands over, one after the other."""

    @property
    def waits_left(self) -> int:  # type: ignore[override]
        return len(self.comes)

    def wait_here(self) -> bool:
        if not self.comes:
            return False
        self.comes.pop(0)()
        return True

    def define_group(self, links: Sequence[Link]) -> LinkGroup:
        self.groups.append(RecordingGroup(tuple(links)))  # type: ignore[arg-type]
        return self.groups[-1]

    @property
    def mover(self) -> Mover:
        return self.memory

    def flush(self) -> None:
        pass

    async def run(self, handler: LinkHandler) -> None:
        await trio.sleep_forever()

    def close(self) -> None:
        pass


@attrs.define(eq=False)
class Caller:
    """A process elsewhere that calls actors of `proc`.

    Attributes:
        peer, link: As `proc` sees it.
    """

    proc: Proc
    peer: Peer
    link: RecordingLink
    count: ReceiveCount
    number: int = 0

    @classmethod
    def of(cls, proc: Proc, proc_id: int = 77, every: int = 32) -> Caller:
        link = RecordingLink()
        return cls(proc, proc.adopt_link(ProcId(proc_id), link), link, ReceiveCount(every, 1 << 20))

    def call(
        self, cell: Cell, name: str, *args: Any, budget: float = math.inf, broadcast: bool = False
    ) -> IncomingCall:
        """Deliver a message."""
        self.number += 1
        spec = cell.endpoints.get(name)
        assert spec is not None
        payload = self.proc.values.encode((args, {}), what="test").payload
        now = trio.current_time()
        number = 0 if broadcast else self.number
        call = IncomingCall(
            self.peer, self.link, number, cell.spec.mesh, spec, payload, (), 10, self.count, now + budget, now
        )
        if number:
            self.peer.inbound[number] = call
        cell.deliver(call)
        return call
