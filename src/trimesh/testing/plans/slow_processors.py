"""Processes whose processor is slow, simulated or real: each endpoint that starts there computes for a while first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import attrs

from trimesh.testing.plans.vocabulary import ProcessorFault


@attrs.define(eq=False)
class _Rule:
    index: int
    fault: ProcessorFault
    keys: Collection[Hashable]
    hit: set[Hashable] = attrs.field(factory=set[Hashable])


@attrs.define(eq=False)
class SlowProcessors:
    """The processors of a whole simulation, or that of one process.

    Attributes:
        fire: Called with the number of a fault, and with whom it slows, the first time that it does.
    """

    fire: Callable[[int, Hashable], None]
    _rules: list[_Rule] = attrs.field(factory=list[_Rule])

    def plan(self, index: int, fault: ProcessorFault, keys: Collection[Hashable]) -> Callable[[], None]:
        """Slow those that `keys` stand for from now on; return what ends it."""
        self._rules.append(_Rule(index, fault, keys))
        return lambda: self.end(index)

    def end(self, index: int) -> None:
        """Let those that a fault has slowed be as fast as ever."""
        self._rules = [rule for rule in self._rules if rule.index != index]

    def seconds(self, key: Hashable) -> float:
        """Return how long one of them computes, now that an endpoint starts there."""
        total = 0.0
        for rule in self._rules:
            if key in rule.keys:
                total += rule.fault.seconds
                if key not in rule.hit:
                    rule.hit.add(key)
                    self.fire(rule.index, key)
        return total
