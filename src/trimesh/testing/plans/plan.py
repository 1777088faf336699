"""The faults and steps of one run: what was planned, what has fired, what the run does without."""

from __future__ import annotations

import attrs

from trimesh.testing.plans.keys import is_among
from trimesh.testing.plans.vocabulary import ClockFault, Fault, Fired, LinkFault


class UnfiredFault(AssertionError):
    """A fault was planned and did not happen: the test has tested less than it says."""


@attrs.define(eq=False)
class Planned:
    """One planned fault.

    Attributes:
        index: Its number, in the order of planning.
        key: What it is called on the command line: `f0`, `f1` for those that the test plans, `c0.3` for chaos.
        fault: What.
        fired: How often it has happened.
        is_left_out: Whether this run does without it (to find the faults that matter).
    """

    index: int
    key: str
    fault: Fault
    fired: int = 0
    is_left_out: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether it must happen in each run, not only in some."""
        return not self.is_chance and (not isinstance(self.fault, LinkFault) or self.fault.is_certain)

    @property
    def is_chance(self) -> bool:
        """Whether it is one of the many that chaos has drawn."""
        return self.key.startswith("c")

    @property
    def is_drawn(self) -> bool:
        """Whether a seed decides what it hits, or how hard."""
        return not self.is_certain or (isinstance(self.fault, ClockFault) and self.fault.skew != 0)


@attrs.define(eq=False)
class FaultPlan:
    """All faults of one run.

    Attributes:
        planned: In order.
        log: What has happened, in order: the fixture `fault_log`.
        left_out: Keys of faults and steps that this run does without.
        steps: What the test has gone through step by step (`chaos.steps`), by key.
    """

    planned: list[Planned] = attrs.field(factory=list[Planned])
    log: list[Fired] = attrs.field(factory=list[Fired])
    left_out: frozenset[str] = frozenset()
    steps: dict[str, object] = attrs.field(factory=dict[str, object])

    def takes(self, key: str, step: object) -> bool:
        """Return whether this run takes a step of the test, and note it then; one that is left out is skipped."""
        if is_among(key, self.left_out):
            return False
        self.steps[key] = step
        return True

    def add(self, fault: Fault, key: str | None = None) -> Planned:
        own = sum(not one.is_chance for one in self.planned)
        key = key or f"f{own}"
        made = Planned(len(self.planned), key, fault, is_left_out=is_among(key, self.left_out))
        self.planned.append(made)
        return made

    def fire(self, index: int, time: float, site: str, where: str) -> Fired:
        """Note that a fault happens."""
        planned = self.planned[index]
        planned.fired += 1
        fired = Fired(time, site, where, planned.fault)
        self.log.append(fired)
        return fired

    def unfired(self) -> list[Planned]:
        return [one for one in self.planned if not one.fired and not one.is_left_out]

    def check(self) -> None:
        """Complain about faults that had to happen and did not.

        Raises:
            UnfiredFault: There are some; the text names them.
        """
        missing = [str(one.fault) for one in self.unfired() if one.is_certain]
        if missing:
            raise UnfiredFault(f"planned, but never happened: {'; '.join(missing)}")
