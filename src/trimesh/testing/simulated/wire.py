"""The wires of a simulated family: seeded delays, and the faults of links.

Links are reliable, here as over real transports. So what is lost is the whole link from the message on that is hit; a
message that is damaged or comes twice breaks the protocol, which ends the link, too; everything else is a matter of
time. A place that is *held* hears nothing; once the heartbeats of a child have been held for `limits.LEASE_SECONDS`,
its owner gives it up, as the native library does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trimesh import limits
from trimesh._transport.in_memory.pipe import Delivery, Fate
from trimesh._transport.in_memory.transport import MemoryLink
from trimesh._transport.interface.base import DownReason, Lane, LinkDown
from trimesh.ids import ProcId
from trimesh.testing.plans.vocabulary import LinkFault, Place

if TYPE_CHECKING:
    from trimesh.testing.simulated.job_host import HostCut

FATES = {"drop": Fate.LOST, "reset": Fate.LOST, "duplicate": Fate.REPEATED, "corrupt": Fate.DAMAGED}


@attrs.frozen(eq=False)
class Hold:
    """One reason why nothing passes.

    Attributes:
        sources, targets: What is sent from one to the other is held; None for all.
        ends_lease: Whether heartbeats are held, too.
    """

    sources: frozenset[Place] | None
    targets: frozenset[Place] | None
    ends_lease: bool = True

    def covers(self, source: Place, target: Place) -> bool:
        return (self.sources is None or source in self.sources) and (self.targets is None or target in self.targets)


@attrs.define(eq=False)
class _Disturbance:
    """A fault of links, while it lasts."""

    fault: LinkFault
    draw: random.Random
    on_hit: Callable[[str], None]
    passed_bytes: dict[tuple[ProcId, ProcId], int] = attrs.field(factory=dict[tuple[ProcId, ProcId], int])
    busy_until: dict[tuple[ProcId, ProcId], float] = attrs.field(factory=dict[tuple[ProcId, ProcId], float])

    def fate(self, pair: tuple[ProcId, ProcId], size: int) -> Fate:
        kind, amount = self.fault.kind, self.fault.amount
        if kind == "reset":
            self.passed_bytes[pair] = self.passed_bytes.get(pair, 0) + size
            return Fate.LOST if self.passed_bytes[pair] > amount else Fate.ARRIVES
        if kind in FATES and self.draw.random() < amount:
            return FATES[kind]
        return Fate.ARRIVES

    def delay(self, pair: tuple[ProcId, ProcId], size: int) -> float:
        kind, amount = self.fault.kind, self.fault.amount
        if kind == "delay":
            return amount
        if kind == "reorder":
            return self.draw.uniform(0, amount)
        if kind == "bandwidth":
            now = trio.current_time()
            self.busy_until[pair] = max(self.busy_until.get(pair, now), now) + size / amount
            return self.busy_until[pair] - now
        return 0.0


@attrs.define(eq=False)
class Wired:
    """One end of one link.

    Attributes:
        owner, peer: Whose end it is, and who is at the other.
        link: The end.
        on_lease: Tells the owner that the peer's lease has run out; None where no lease is held.
        lease: Name of its limit.
    """

    owner: ProcId
    peer: ProcId
    link: MemoryLink
    on_lease: Callable[[LinkDown], None] | None = None
    lease: str = "LEASE_SECONDS"
    silent_since: float | None = None


@attrs.define(eq=False)
class SimWire(Delivery):
    """All wires of one simulated family.

    Attributes:
        draw: Random numbers of the delays.
        jitter: Each message is under way for a random time up to this.
        place_of: Where a process belongs.
        start_soon: Starts a task of the simulation.
    """

    draw: random.Random
    jitter: float
    place_of: Callable[[ProcId], Place]
    start_soon: Callable[..., None]
    _wired: list[Wired] = attrs.field(factory=list[Wired])
    _holds: list[Hold | HostCut] = attrs.field(factory=list["Hold | HostCut"])
    _disturbances: list[_Disturbance] = attrs.field(factory=list[_Disturbance])

    def fate(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> Fate:
        """Return what the faults that are planned for this link make of a message."""
        del lane
        for disturbance in self._on(source, target):
            fate = disturbance.fate((source, target), size)
            if fate is not Fate.ARRIVES:
                disturbance.on_hit(f"{size} bytes")
                return fate
        return Fate.ARRIVES

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        """Return the seeded delay, and what the faults add."""
        del lane
        delay = self.draw.uniform(0, self.jitter) if self.jitter else 0.0
        for disturbance in self._on(source, target):
            more = disturbance.delay((source, target), size)
            if more:
                disturbance.on_hit(f"{more:g} s")
                delay += more
        return delay

    def _on(self, source: ProcId, target: ProcId) -> Sequence[_Disturbance]:
        if not self._disturbances:
            return ()
        ends = self.place_of(source), self.place_of(target)
        return [one for one in self._disturbances if one.fault.covers(*ends)]

    def disturb(self, fault: LinkFault, draw: random.Random, on_hit: Callable[[str], None]) -> Callable[[], None]:
        """Begin a fault of links; return what ends it."""
        made = _Disturbance(fault, draw, on_hit)
        self._disturbances.append(made)
        return lambda: self._disturbances.remove(made) if made in self._disturbances else None

    # ---- holding ---------------------------------------------------------------------------------------------

    def add(self, wired: Wired) -> None:
        """Take one end of a new link."""
        self._wired = [one for one in self._wired if not one.link.is_down]
        self._wired.append(wired)
        self._look(wired)

    def hold(self, hold: Hold | HostCut) -> Callable[[], None]:
        """Let nothing pass; return what lets it pass again."""
        self._holds.append(hold)
        self._look_at_all()

        def release() -> None:
            if hold in self._holds:
                self._holds.remove(hold)
                self._look_at_all()

        return release

    def unheard_with(self, proc_id: ProcId) -> list[ProcId]:
        """Return the processes between which and this one something is held, or on its way: it will not be heard."""
        mine = [wired for wired in self._wired if proc_id in (wired.owner, wired.peer)]
        unheard = [wired for wired in mine if wired.link.incoming.is_held or wired.link.incoming.depth]
        return [wired.peer if wired.owner == proc_id else wired.owner for wired in unheard]

    def release_all(self) -> None:
        self._holds.clear()
        self._disturbances.clear()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for wired in self._wired:
            self._look(wired)

    def _look(self, wired: Wired) -> None:
        source, target = self.place_of(wired.peer), self.place_of(wired.owner)
        holds = [hold for hold in self._holds if hold.covers(source, target)]
        if wired.link.incoming.is_held != bool(holds):
            wired.link.hold(held=bool(holds))
        if not any(hold.ends_lease for hold in holds):
            wired.silent_since = None
        elif wired.silent_since is None and wired.on_lease is not None:
            wired.silent_since = trio.current_time()
            self.start_soon(self._expire, wired, wired.silent_since)

    async def _expire(self, wired: Wired, since: float) -> None:
        await trio.sleep(getattr(limits, wired.lease))
        if wired.silent_since == since and not wired.link.is_down and wired.on_lease is not None:
            wired.link.abort()
            wired.on_lease(LinkDown(DownReason.LEASE))
