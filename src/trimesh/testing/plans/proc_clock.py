"""The clocks of one real process, set wrong by a test: Trio's, which deadlines and budgets go by, and `time.time`.

Trio's clock cannot be set, as a monotonic one cannot, but its rate can be wrong. `time.time` and `time.time_ns` are
what Python code there reads; what C code asks the system for (`datetime.now`) is not changed. The native library counts
its beats and leases by itself.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import trio


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
