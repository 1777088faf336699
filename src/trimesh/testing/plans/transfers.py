"""Transfers of buffers that fail or are late as planned, counted in the process that makes them, simulated or real."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial

import attrs
import trio

from trimesh.testing.plans.vocabulary import TransferFault


@attrs.define(eq=False)
class _Rule:
    index: int
    fault: TransferFault
    keys: Collection[Hashable]
    counts: dict[Hashable, int] = attrs.field(factory=dict[Hashable, int])

    def hits(self, key: Hashable) -> bool:
        """Count one transfer, and tell whether it is one of those that are meant."""
        if key not in self.keys:
            return False
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return self.fault.nth <= count < self.fault.nth + self.fault.times


@attrs.define(eq=False)
class FailingTransfers:
    """The transfers of one process, or of a whole simulation.

    Attributes:
        fire: Called with the number of a fault, and with who makes the transfer, when it happens.
    """

    fire: Callable[[int, Hashable], None]
    _rules: list[_Rule] = attrs.field(factory=list[_Rule])

    def plan(self, index: int, fault: TransferFault, keys: Collection[Hashable]) -> Callable[[], None]:
        """Let transfers of those that `keys` stand for misbehave, counted from now on; return what ends it."""
        rule = _Rule(index, fault, keys)
        self._rules.append(rule)
        return lambda: self._rules.remove(rule) if rule in self._rules else None

    def moving(self, key: Hashable) -> Callable[[], Awaitable[None]] | None:
        """Count a transfer of one of them, and return what it has to wait for; see `Sites.moving`."""
        hits = [rule for rule in self._rules if rule.hits(key)]
        if not hits:
            return None
        for rule in hits:
            self.fire(rule.index, key)
        error = next((rule.fault.error for rule in hits if rule.fault.error is not None), None)
        return partial(_disturb, sum(rule.fault.seconds for rule in hits), error)


async def _disturb(seconds: float, error: BaseException | None) -> None:
    await trio.sleep(seconds)
    if error is not None:
        raise copy.copy(error)  # an exception that is raised twice would carry the traceback of the first time
