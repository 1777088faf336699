"""Memory and descriptors that a simulated system refuses: there is one seam, the making of a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

import attrs

from trimesh.testing.plans.plan import Planned
from trimesh.testing.plans.vocabulary import Place, ResourceFault

_CODES: Final = {"ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE}


@attrs.define(eq=False)
class _Rule:
    index: int
    fault: ResourceFault
    counts: dict[Place, int] = attrs.field(factory=dict[Place, int])

    def hits(self, place: Place) -> bool:
        if place not in self.fault.where.places:
            return False
        count = self.counts[place] = self.counts.get(place, 0) + 1
        return self.fault.nth <= count < self.fault.nth + self.fault.times


@attrs.define(eq=False)
class Refusals:
    """What is planned for all processes of a simulation.

    Attributes:
        fire: Called with number, site and place of a fault when it happens.
    """

    fire: Callable[[int, str, str], None]
    _rules: list[_Rule] = attrs.field(factory=list[_Rule])

    def plan(self, planned: Planned, fault: ResourceFault) -> Callable[[], None]:
        """Refuse from now on; return what ends it."""
        rule = _Rule(planned.index, fault)
        self._rules.append(rule)
        return lambda: self._rules.remove(rule) if rule in self._rules else None

    def check(self, place: Place) -> None:
        """Let a process make its end of a link.

        Raises:
            OSError: It is refused what it needs for that.
        """
        for rule in self._rules:
            if rule.hits(place):
                self.fire(rule.index, "resources", rule.fault.where.text)
                code = _CODES[rule.fault.error]
                raise OSError(code, os.strerror(code))
