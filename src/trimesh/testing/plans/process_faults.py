"""Process faults: ends, stops, stalls, slowness and wrong clocks."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec
from trimesh.testing.plans.endpoint_faults import PLAIN, run
from trimesh.testing.plans.fault import (
    ActiveFault,
    Heal,
    MemberFault,
    Moment,
    OfMembers,
    Place,
    checked_amount,
    healed,
)

if TYPE_CHECKING:
    from trimesh.testing.plans.armed import Armed
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

# ---- ends ------------------------------------------------------------------------------------------------------------

SIGNALS: Final = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigsegv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "oom": signal.SIGKILL,
}
HOWS: Final = (*SIGNALS, "sigstop", "exit(n)", "hold_gil(seconds)")
_WITH_NUMBER: Final = re.compile(r"(exit|hold_gil)\((\d+(?:\.\d+)?)\)")


def parse_how(how: str) -> tuple[str, float]:
    """Return (kind, number) of a way to die: `exit(3)` gives ("exit", 3.0), `sigkill` ("sigkill", 0.0).

    Raises:
        ValueError: There is no such way.
    """
    found = _WITH_NUMBER.fullmatch(how)
    if found is not None:
        return found[1], float(found[2])
    if how in SIGNALS or how == "sigstop":
        return how, 0.0
    raise ValueError(f"a process is killed by one of {', '.join(HOWS)}, got {how!r}")


@attrs.frozen
class Death(MemberFault):
    """Processes end, or stop answering, now.

    Attributes:
        how: One of `HOWS`.
        moment: When a real process ends by "sigkill": at once; or at the start, or the end, of its next endpoint.
    """

    how: str
    moment: Moment = "now"

    def __str__(self) -> str:
        at = "" if self.moment == "now" else f" at the {self.moment} of an endpoint"
        return f"kill {self.where.text}: {self.how}{at}"

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        kind, number = parse_how(self.how)
        run.fire(planned.index, "process", self.where.text)
        if kind == "sigstop":
            return run.freeze(self.where.places, None)
        if kind == "hold_gil":
            return run.stick(self.where.places, number)
        for child in run.living_at(self.where.places):
            run.fell(child)
            if kind == "exit":
                child.die(code=int(number))
            else:
                child.die(signum=SIGNALS[kind], oom_killed=kind == "oom", last_words="simulated")
        return healed

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        kind, _ = parse_how(self.how)
        places = self.where.places
        if self.moment != "now" or kind in ("exit", "hold_gil"):
            run.arm(planned, places)
        else:
            run.signal(places, signal.SIGSTOP if kind == "sigstop" else SIGNALS[kind])
        if self.moment != "now":
            run.kill_if_idle(places)
        run.fire(planned.index, "process", self.where.text)
        return (lambda: run.signal(places, signal.SIGCONT)) if kind == "sigstop" else healed

    def armed(self, process: Armed, index: int) -> Heal:
        kind, number = parse_how(self.how)
        if self.moment != "now":
            return process.faults.begin(index, self)
        if kind == "exit":
            os._exit(int(number))
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(number * 1e6)))  # a PyDLL keeps the GIL while its function runs
        return healed

    def dispatch(
        self, active: ActiveFault, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec
    ) -> EndpointSpec:
        """End the real process: at the start of an endpoint, or when it has run and not replied yet."""
        del active, place, cell, call
        if self.moment == "start" or spec.kind not in PLAIN:
            os.kill(os.getpid(), signal.SIGKILL)

        async def last(*args: Any, **kwargs: Any) -> Any:
            try:
                return await run(spec, *args, **kwargs)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return attrs.evolve(spec, fn=last, kind=EndpointKind.ASYNC)


# ---- blocked and slow processes --------------------------------------------------------------------------------------


@attrs.frozen
class LoopLag(MemberFault):
    """The loops of processes are blocked for `seconds`: they take and send no message; heartbeats go on."""

    seconds: float

    def __str__(self) -> str:
        return f"loop {self.where.text}: lag({self.seconds:g})"

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        run.fire(planned.index, "loop", self.where.text)
        return run.stick(self.where.places, self.seconds)

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        run.arm(planned, self.where.places)
        run.fire(planned.index, "loop", self.where.text)
        return healed

    def armed(self, process: Armed, index: int) -> Heal:
        del process, index
        time.sleep(self.seconds)
        return healed


class OfLoop(OfMembers):
    """Event loops of processes."""

    def lag(self, seconds: float) -> None:
        """Block them for `seconds`: they take no message, and nothing they send arrives. Heartbeats go on."""
        self._faults.plan(LoopLag(self._where, checked_amount("seconds", seconds)))


@attrs.frozen
class ProcessorFault(MemberFault):
    """Whenever an endpoint starts in one of these processes, the process first computes for `seconds`."""

    seconds: float

    def __str__(self) -> str:
        return f"processor {self.where.text}: slow({self.seconds:g})"

    def computing(self, active: ActiveFault, place: Place) -> float:
        if place not in self.where.places:
            return 0.0
        if active.hits(place, 1):
            active.fire_at("processor", place)
        return self.seconds


class OfProcessor(OfMembers):
    """Processors of processes."""

    def slow(self, seconds: float) -> Heal:
        """Compute for `seconds` before each start of an endpoint there; the process does nothing else meanwhile.

        Returns:
            A function that ends it.
        """
        return self._faults.plan(ProcessorFault(self._where, checked_amount("seconds", seconds)))


# ---- clocks ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class ClockFault(MemberFault):
    """The wall clock of processes is set, or all their clocks run `1 + drift` times as fast, until the test ends.

    Attributes:
        jump: Seconds by which it is set forward.
        drift: Share by which it runs faster.
        skew: Most seconds by which each is set forward or back; a seed draws the amount of each.
    """

    jump: float = 0.0
    drift: float = 0.0
    skew: float = 0.0

    def __str__(self) -> str:
        kind = "drift" if self.drift else "skew" if self.skew else "jump"
        effect = f"{kind}({self.drift or self.skew or self.jump:g})"
        return f"clock {self.where.text}: {effect}"

    @property
    def is_drawn(self) -> bool:
        return self.skew != 0

    def _jumps(self, draw: random.Random) -> list[tuple[Place, float]]:
        """Return each place, and by how much its wall clock is set forward."""
        return [(place, self.jump + draw.uniform(-self.skew, self.skew)) for place in self.where.places]

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        for place, jump in self._jumps(run.draw("clock", planned)):
            run.time.clock(place).set(jump=jump, drift=self.drift)
        run.fire(planned.index, "clock", self.where.text)
        return healed

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        run.checked_armed(self.where.places)  # sets all of them, or none
        for place, jump in self._jumps(run.draw("clock", planned)):
            if place is None:
                run.clock.set(jump=jump, drift=self.drift)
            else:
                run.arm(planned, (place,), attrs.evolve(self, jump=jump, skew=0.0))
        run.fire(planned.index, "clock", self.where.text)
        return healed

    def armed(self, process: Armed, index: int) -> Heal:
        del index
        process.clock.set(jump=self.jump, drift=self.drift)
        return healed


@attrs.define(eq=False)
class _Reading:
    """Reading of a clock: `value + (now - since) * rate`, where `now` is the reading of the true clock."""

    value: float
    since: float
    rate: float = 1.0

    def at(self, now: float) -> float:
        return self.value + (now - self.since) * self.rate

    def set(self, now: float, *, jump: float = 0.0, drift: float = 0.0) -> None:
        self.value, self.since = self.at(now) + jump, now
        self.rate += drift


class _TrioClock(trio.abc.Clock):
    """Trio's clock, at another rate."""

    def __init__(self, true: trio.abc.Clock) -> None:
        now = true.current_time()
        self.true = true
        self.reading = _Reading(now, now)

    def start_clock(self) -> None:
        """Do nothing: it replaces a running clock."""

    def current_time(self) -> float:
        return self.reading.at(self.true.current_time())

    def deadline_to_sleep_time(self, deadline: float) -> float:
        true_seconds = (deadline - self.current_time()) / self.reading.rate
        return self.true.deadline_to_sleep_time(self.true.current_time() + true_seconds)


@attrs.define(eq=False)
class ProcClock:
    """The clocks of this process, correct until a test sets them.

    Trio's clock, which deadlines and budgets use, is monotonic: it cannot be set, but its rate can be wrong. Python
    code reads `time.time` and `time.time_ns`; C code that reads the system's clock (`datetime.now`) is not affected,
    nor are beats and leases of the native library.
    """

    _wall: _Reading | None = None
    _trio: _TrioClock | None = None
    _true_ns: Any = time.time_ns
    _true_time: Any = time.time

    def set(self, *, jump: float, drift: float) -> None:
        """Set the wall clock forward (or back), and let both clocks run faster (or slower)."""
        if self._wall is None:
            now = self._true_time()
            wall = self._wall = _Reading(now, now)
            time.time = lambda: wall.at(self._true_time())
            time.time_ns = lambda: int(wall.at(self._true_ns() / 1e9) * 1e9)
        self._wall.set(self._true_time(), jump=jump, drift=drift)
        if not drift:
            return
        if self._trio is None:
            core: Any = trio._core  # noqa: SLF001 - a running clock has no public place
            runner = core._run.GLOBAL_RUN_CONTEXT.runner  # noqa: SLF001 - see above
            self._trio = runner.clock = _TrioClock(runner.clock)
        self._trio.reading.set(self._trio.true.current_time(), drift=drift)

    def restore(self) -> None:
        """Restore the wall clock; Trio's clock ends with its run."""
        if self._wall is not None:
            time.time, time.time_ns = self._true_time, self._true_ns
            self._wall = None


class OfClock(OfMembers):
    """Clocks of processes."""

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward (or back). Deadlines and budgets must not be affected."""
        self._faults.plan(ClockFault(self._where, jump=float(seconds)))

    def drift(self, rate: float) -> None:
        """Let the clock run `1 + rate` times as fast, budgets of calls that arrive included."""
        if rate <= -1:
            raise ValueError(f"drift must be above -1, as a clock cannot stand still or run backwards, got {rate!r}")
        self._faults.plan(ClockFault(self._where, drift=float(rate)))

    def skew(self, seconds: float) -> None:
        """Set each wall clock forward or back by an amount up to this bound, which the seed draws."""
        self._faults.plan(ClockFault(self._where, skew=checked_amount("seconds", seconds)))
