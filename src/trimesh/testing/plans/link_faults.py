"""Faults of links: messages that are late, lost, repeated or damaged, and partitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import attrs
import trio

from trimesh._transport.in_memory.transport import Fate
from trimesh.ids import ProcId
from trimesh.testing.plans.fault import Direction, Fault, Heal, Place, Where, all_healed, checked_amount

if TYPE_CHECKING:
    from trimesh.testing.plans.faults import Faults
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

Disturbance = Literal["drop", "delay", "duplicate", "reorder", "corrupt", "bandwidth", "reset"]

FATES: Final = {"drop": Fate.LOST, "duplicate": Fate.REPEATED, "corrupt": Fate.DAMAGED}
"""Fate of a message that is hit at random, by kind of fault."""


@attrs.frozen
class _BetweenPlaces(Fault):
    a: Where
    b: Where

    @property
    def where(self) -> str:
        return f"{self.a.text} - {self.b.text}"


@attrs.frozen
class LinkFault(_BetweenPlaces):
    """Messages between two places are disturbed until the fault is healed.

    Attributes:
        kind: "drop" and "reset" end the link at the message that is hit; "corrupt" damages it, which ends the link as a
            breach of the protocol; "duplicate" sends it twice; "delay", "reorder" and "bandwidth" make it late.
        amount: Probability for "drop", "duplicate" and "corrupt"; seconds for "delay" and "reorder"; bytes a second for
            "bandwidth"; bytes for "reset".
    """

    kind: Disturbance
    amount: float
    direction: Direction = "both"

    def __str__(self) -> str:
        return f"link {self.where}: {self.kind}({self.amount:g})"

    @property
    def is_certain(self) -> bool:
        return self.kind not in FATES or self.amount >= 1

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        wire = DisturbedWire(self, run.draw("link", planned), lambda: run.fire(planned.index, "link", self.where))
        return run.wire.disturb(wire)

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        pairs = run.pairs(self.a.places, self.b.places, self.direction)
        draw = run.draw("link", planned)
        rows = [run.table.disturb(self.kind, *pair, self.amount, draw.getrandbits(64)) for pair in pairs]
        return run.in_table(rows, planned, "link", self.where)


@attrs.define(eq=False)
class DisturbedWire:
    """A fault of simulated links, while it lasts.

    Attributes:
        on_hit: Called for each message that it hits.
    """

    fault: LinkFault
    draw: random.Random
    on_hit: Callable[[], None]
    _passed_bytes: dict[tuple[ProcId, ProcId], int] = attrs.field(factory=dict[tuple[ProcId, ProcId], int])
    _busy_until: dict[tuple[ProcId, ProcId], float] = attrs.field(factory=dict[tuple[ProcId, ProcId], float])

    def covers(self, source: Place, target: Place) -> bool:
        """Return whether messages from `source` to `target` are disturbed."""
        a, b, direction = self.fault.a.places, self.fault.b.places, self.fault.direction
        forth, back = source in a and target in b, source in b and target in a
        return (forth and direction != "b_to_a") or (back and direction != "a_to_b")

    def fate(self, pair: tuple[ProcId, ProcId], size: int) -> Fate:
        """Return the fate of a message between two processes."""
        kind, amount = self.fault.kind, self.fault.amount
        fate = Fate.ARRIVES
        if kind == "reset":
            self._passed_bytes[pair] = self._passed_bytes.get(pair, 0) + size
            fate = Fate.LOST if self._passed_bytes[pair] > amount else Fate.ARRIVES
        elif kind in FATES and self.draw.random() < amount:
            fate = FATES[kind]
        if fate is not Fate.ARRIVES:
            self.on_hit()
        return fate

    def delay(self, pair: tuple[ProcId, ProcId], size: int) -> float:
        """Return the delay of a message between two processes, in seconds."""
        kind, amount = self.fault.kind, self.fault.amount
        seconds = 0.0
        if kind == "delay":
            seconds = amount
        elif kind == "reorder":
            seconds = self.draw.uniform(0, amount)
        elif kind == "bandwidth":
            now = trio.current_time()
            self._busy_until[pair] = max(self._busy_until.get(pair, now), now) + size / amount
            seconds = self._busy_until[pair] - now
        if seconds:
            self.on_hit()
        return seconds


@attrs.frozen
class Partition(_BetweenPlaces):
    """Messages between two places are held until it is healed, and then delivered in order."""

    direction: Direction = "both"

    def __str__(self) -> str:
        return f"partition {self.where}: {self.direction}"

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        run.fire(planned.index, "partition", self.where)
        heals: list[Heal] = []
        if self.direction != "b_to_a":
            heals.append(run.hold(self.a.places, self.b.places))
        if self.direction != "a_to_b":
            heals.append(run.hold(self.b.places, self.a.places))
        return all_healed(*heals)

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        pairs = run.pairs(self.a.places, self.b.places, self.direction)
        run.fire(planned.index, "partition", self.where)
        return run.in_table([run.table.disturb("hold", *pair) for pair in pairs])


@attrs.frozen(eq=False)
class OfLink:
    """Links between two places; faults of them add up, and last until `faults.heal()`."""

    _faults: Faults
    _a: Where
    _b: Where
    _direction: Direction = "both"

    def drop(self, probability: float = 1.0) -> OfLink:
        """Lose messages; the first lost one ends the link."""
        return self._plan("drop", checked_amount("a probability", probability, most=1))

    def delay(self, seconds: float) -> OfLink:
        """Delay every message."""
        return self._plan("delay", checked_amount("seconds", seconds))

    def duplicate(self, probability: float = 1.0) -> OfLink:
        """Deliver messages twice. The receiver drops the second, and counts it in `statistics()`."""
        return self._plan("duplicate", checked_amount("a probability", probability, most=1))

    def reorder(self, seconds: float) -> OfLink:
        """Delay each message by a random time up to `seconds`, so that those of different links and lanes reorder."""
        return self._plan("reorder", checked_amount("seconds", seconds))

    def corrupt(self, probability: float = 1.0) -> OfLink:
        """Damage messages, which breaks the protocol and ends the link."""
        return self._plan("corrupt", checked_amount("a probability", probability, most=1))

    def bandwidth(self, bytes_per_second: float) -> OfLink:
        """Limit the bandwidth of each direction."""
        return self._plan("bandwidth", checked_amount("bytes a second", bytes_per_second))

    def reset_after(self, nbytes: float) -> OfLink:
        """End the link with the message that exceeds so many bytes in one direction."""
        return self._plan("reset", checked_amount("bytes", nbytes))

    def _plan(self, kind: Disturbance, amount: float) -> OfLink:
        self._faults.plan(LinkFault(self._a, self._b, kind, amount, self._direction))
        return self
