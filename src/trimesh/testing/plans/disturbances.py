"""Starts of processes that fail as planned, counted in the process that starts them, simulated or real."""

from __future__ import annotations

import copy
import errno
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.system.records import WorkerConfig
from trimesh.errors import SpawnError, place_name
from trimesh.testing.plans.plan import Planned
from trimesh.testing.plans.vocabulary import Place, ProcessorFault, ResourceFault, SpawnFault, TransferFault

STILLBORN: Final = f"{__name__}:end_unheard"
"""What a process runs that ends before its first word."""


def end_unheard(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """End as a worker does whose set-up has failed: with a word on stderr, and none to its owner."""
    del config
    for one in (link, broker):
        one.close()
    for pidfd in lifelines:
        os.close(pidfd)
    sys.stderr.write("a planned fault: it ended before its first word\n")
    return 1


@attrs.define(eq=False)
class FailingStarts:
    """The starts of one process, or of a whole simulation.

    Attributes:
        fire: Called with number, site and place of a fault when it happens.
    """

    fire: Callable[[int, str, str], None]
    _planned: list[tuple[int, SpawnFault, int]] = attrs.field(factory=list[tuple[int, SpawnFault, int]])
    _launched: int = 0

    def plan(self, planned: Planned, fault: SpawnFault) -> None:
        """Let a start fail, counted from now on."""
        self._planned.append((planned.index, fault, self._launched))

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        """Count a start, and return what is to be started for it; see `Sites.launching`."""
        self._launched += 1
        for index, fault, first in self._planned:
            if self._launched == first + fault.nth:
                where = place_name(request.mesh, request.whole.point(request.rank))
                self.fire(index, "spawn", where)
                if fault.stage == "launch":
                    raise SpawnError(f"{where} could not be started: a planned fault ({fault})")
                return msgspec.structs.replace(request, entry=STILLBORN)
        return request


# ---- memory and descriptors that a simulated system refuses: there is one seam, the making of a link -----------------

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


# ---- slow processors -------------------------------------------------------------------------------------------------

# Processes whose processor is slow, simulated or real: each endpoint that starts there computes for a while first.


@attrs.define(eq=False)
class _SlowRule:
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
    _rules: list[_SlowRule] = attrs.field(factory=list[_SlowRule])

    def plan(self, index: int, fault: ProcessorFault, keys: Collection[Hashable]) -> Callable[[], None]:
        """Slow those that `keys` stand for from now on; return what ends it."""
        self._rules.append(_SlowRule(index, fault, keys))
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


# ---- transfers -------------------------------------------------------------------------------------------------------

# Transfers of buffers that fail or are late as planned, counted in the process that makes them, simulated or real.


@attrs.define(eq=False)
class _TransferRule:
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
    _rules: list[_TransferRule] = attrs.field(factory=list[_TransferRule])

    def plan(self, index: int, fault: TransferFault, keys: Collection[Hashable]) -> Callable[[], None]:
        """Let transfers of those that `keys` stand for misbehave, counted from now on; return what ends it."""
        rule = _TransferRule(index, fault, keys)
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


# ---- proc clock ------------------------------------------------------------------------------------------------------

# The clocks of one real process, set wrong by a test: Trio's, which deadlines and budgets go by, and `time.time`.
#
# Trio's clock cannot be set, as a monotonic one cannot, but its rate can be wrong. `time.time` and `time.time_ns` are
# what Python code there reads; what C code asks the system for (`datetime.now`) is not changed. The native library
# counts its beats and leases by itself.


@attrs.define(eq=False)
class _Skew:
    """A clock that reads `value + (now - since) * rate`, where `now` is what the true one reads."""

    value: float
    since: float
    rate: float = 1.0

    def read(self, now: float) -> float:
        return self.value + (now - self.since) * self.rate

    def set(self, now: float, *, jump: float = 0.0, drift: float = 0.0) -> None:
        self.value, self.since = self.read(now) + jump, now
        self.rate += drift


class _SkewedClock(trio.abc.Clock):
    """Trio's clock, at another rate."""

    def __init__(self, true: trio.abc.Clock) -> None:
        now = true.current_time()
        self.true = true
        self.skew = _Skew(now, now)

    def start_clock(self) -> None:
        """Do nothing: it is put in place of a clock that runs."""

    def current_time(self) -> float:
        return self.skew.read(self.true.current_time())

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return self.true.deadline_to_sleep_time(self.true.current_time() + self._true_seconds(deadline))

    def _true_seconds(self, deadline: float) -> float:
        return (deadline - self.current_time()) / self.skew.rate


@attrs.define(eq=False)
class ProcClock:
    """The clocks of the running process, true until they are set."""

    _wall: _Skew | None = None
    _trio: _SkewedClock | None = None
    _true_ns: Any = time.time_ns
    _true_time: Any = time.time

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward (or back)."""
        self._wall_skew().set(self._true_time(), jump=seconds)

    def drift(self, rate: float) -> None:
        """Let both clocks run faster (or slower) by so much."""
        self._wall_skew().set(self._true_time(), drift=rate)
        if self._trio is None:
            core: Any = trio._core  # noqa: SLF001 - a running clock has no public place
            runner = core._run.GLOBAL_RUN_CONTEXT.runner  # noqa: SLF001 - see above
            self._trio = runner.clock = _SkewedClock(runner.clock)
        self._trio.skew.set(self._trio.true.current_time(), drift=rate)

    def _wall_skew(self) -> _Skew:
        if self._wall is None:
            now = self._true_time()
            skew = self._wall = _Skew(now, now)
            time.time = lambda: skew.read(self._true_time())
            time.time_ns = lambda: int(skew.read(self._true_ns() / 1e9) * 1e9)
        return self._wall

    def restore(self) -> None:
        """Let the wall clock be true again; that of Trio ends with its run."""
        if self._wall is not None:
            time.time, time.time_ns = self._true_time, self._true_ns
            self._wall = None
