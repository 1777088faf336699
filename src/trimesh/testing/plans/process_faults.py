"""Process faults: kills, stops (SIGSTOP), blocked event loops, slow processors and wrong clocks."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
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
    all_healed,
    checked_amount,
    healed,
    once,
)

if TYPE_CHECKING:
    from trimesh.testing.plans.armed import Armed
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

# ---- kills and stops -------------------------------------------------------------------------------------------------

SIGNALS: Final = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigsegv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "oom": signal.SIGKILL,
}
HOWS: Final = (*SIGNALS, "sigstop", "exit(n)", "hold_gil(seconds)")
"""Values of `how` in `faults.kill(members, how)`; `n` and `seconds` stand for numbers."""
_WITH_NUMBER: Final = re.compile(r"(exit|hold_gil)\((\d+(?:\.\d+)?)\)")


def parse_how(how: str) -> tuple[str, float]:
    """Parse a value of `how`: "exit(3)" gives ("exit", 3.0), "sigkill" gives ("sigkill", 0.0).

    Raises:
        ValueError: It is none of `HOWS`.
    """
    found = _WITH_NUMBER.fullmatch(how)
    if found is not None:
        return found[1], float(found[2])
    if how in SIGNALS or how == "sigstop":
        return how, 0.0
    raise ValueError(f"how= must be one of {', '.join(HOWS)}, got {how!r}")


@attrs.frozen
class Death(MemberFault):
    """Fault that ends processes, or stops them from answering ("sigstop", "hold_gil").

    Attributes:
        how: One of `HOWS`.
        moment: When a process ends: at once, at the start of its next endpoint, after the endpoint has run and before
            it answers ("end"), or as soon as it has answered a call ("reply").
    """

    how: str
    moment: Moment = "now"

    def __str__(self) -> str:
        at = "" if self.moment == "now" else f" at the {self.moment} of a call"
        return f"kill {self.where.text}: {self.how}{at}"

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        if self.moment != "now":
            return run.begin(planned)
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
        places = self.where.places
        if self.moment != "now":
            return run.arm(planned, places)
        kind, _ = parse_how(self.how)
        if kind in ("exit", "hold_gil"):
            run.arm(planned, places)
        else:
            run.signal(places, signal.SIGSTOP if kind == "sigstop" else SIGNALS[kind])
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
        del cell, call
        if self.moment == "reply" or not self._is_meant(active, place):
            return spec

        async def last(*args: Any, **kwargs: Any) -> Any:
            try:
                if self.moment == "end":
                    await run(spec, *args, **kwargs)
            finally:
                self._kill(active, place)
            await trio.sleep_forever()  # in a simulation the killed code goes on until it waits

        async def last_items(*args: Any, **kwargs: Any) -> Any:
            self._kill(active, place)
            await last(*args, **kwargs)
            yield

        if spec.kind in PLAIN:
            return msgspec.structs.replace(spec, fn=last, kind=EndpointKind.ASYNC)
        return msgspec.structs.replace(spec, fn=last_items)

    def answered(self, active: ActiveFault, place: Place) -> None:
        if self.moment == "reply":
            self._kill(active, place)

    def _is_meant(self, active: ActiveFault, place: Place) -> bool:
        """Return whether a process should end; a simulated one keeps its place when it is restarted."""
        return place in self.where.places and place not in active.counts

    def _kill(self, active: ActiveFault, place: Place) -> None:
        if self._is_meant(active, place):
            active.hits(place, 1)
            active.fire_at("process", place)
            active.faults.kill(place)


# ---- blocked and slow processes --------------------------------------------------------------------------------------


@attrs.frozen
class LoopLag(MemberFault):
    """Fault that blocks event loops for `seconds`: no message is sent or received. Heartbeats go on."""

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
    """Builder of faults in the event loops of the named processes: `faults.loop(members)`."""

    def lag(self, seconds: float) -> None:
        """Block the loops for `seconds`. Heartbeats go on; no message is received, and none that they send arrives."""
        self._faults.plan(LoopLag(self._where, checked_amount("seconds", seconds)))


@attrs.frozen
class ProcessorFault(MemberFault):
    """Fault that makes processes compute for `seconds` before each endpoint that they run."""

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
    """Builder of processor faults in the named processes: `faults.processor(members)`."""

    def slow(self, seconds: float) -> Heal:
        """Make each endpoint start with `seconds` of computing, which blocks its process.

        Returns:
            A function that ends the fault.
        """
        return self._faults.plan(ProcessorFault(self._where, checked_amount("seconds", seconds)))


# ---- clocks ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class ClockFault(MemberFault):
    """Fault that sets the wall clock of processes, or changes the rate of all their clocks.

    Healing restores the rate. What a clock has gained stays, as a jump does, until the test ends.

    Attributes:
        jump: Seconds by which the wall clock is set forward; negative for back.
        drift: Added to the rate of the clocks: 0.01 lets them run 1 % faster.
        skew: Maximum seconds by which each wall clock is set forward or back; the seed draws the amounts.
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
        """Return (place, seconds) for each process: how far its wall clock is set forward."""
        return [(place, self.jump + draw.uniform(-self.skew, self.skew)) for place in self.where.places]

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        for place, jump in self._jumps(run.draw("clock", planned)):
            run.time.clock(place).set(jump=jump, drift=self.drift)
        run.fire(planned.index, "clock", self.where.text)
        if not self.drift:
            return healed
        return once(all_healed(*(partial(run.time.clock(place).set, drift=-self.drift) for place in self.where.places)))

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        run.checked_armed(self.where.places)  # sets all of them, or none
        heals: list[Heal] = []
        for place, jump in self._jumps(run.draw("clock", planned)):
            if place is None:
                run.clock.set(jump=jump, drift=self.drift)
                heals.append(partial(run.clock.set, drift=-self.drift))
            else:
                heals.append(run.arm(planned, (place,), attrs.evolve(self, jump=jump, skew=0.0)))
        run.fire(planned.index, "clock", self.where.text)
        return once(all_healed(*heals))

    def armed(self, process: Armed, index: int) -> Heal:
        del index
        process.clock.set(jump=self.jump, drift=self.drift)
        return partial(process.clock.set, drift=-self.drift)


@attrs.define(eq=False)
class _Reading:
    """Faulty clock: it reads `value + (now - since) * rate` when the true clock reads `now`."""

    value: float
    since: float
    rate: float = 1.0

    def at(self, now: float) -> float:
        return self.value + (now - self.since) * self.rate

    def set(self, now: float, *, jump: float = 0.0, drift: float = 0.0) -> None:
        self.value, self.since = self.at(now) + jump, now
        self.rate += drift


class _TrioClock(trio.abc.Clock):
    """Trio's clock, running at a wrong rate."""

    def __init__(self, true: trio.abc.Clock) -> None:
        now = true.current_time()
        self.true = true
        self.reading = _Reading(now, now)

    def start_clock(self) -> None:
        """Do nothing: the true clock has been started already."""

    def current_time(self) -> float:
        return self.reading.at(self.true.current_time())

    def deadline_to_sleep_time(self, deadline: float) -> float:
        true_seconds = (deadline - self.current_time()) / self.reading.rate
        return self.true.deadline_to_sleep_time(self.true.current_time() + true_seconds)


@attrs.define(eq=False)
class ProcClock:
    """The clocks of this process, correct until a test sets them.

    `set` replaces `time.time` and `time.time_ns`, and Trio's clock, on which deadlines run. Trio's clock is monotonic:
    it cannot be set, but its rate can be wrong. C code that reads the system's clock (`datetime.now`) is not affected,
    nor are heartbeats and leases of the native library.
    """

    _wall: _Reading | None = None
    _trio: _TrioClock | None = None
    _true_ns: Any = time.time_ns
    _true_time: Any = time.time

    def set(self, *, jump: float = 0.0, drift: float = 0.0) -> None:
        """Set the wall clock forward by `jump` seconds, and add `drift` to the rates of the wall clock and Trio's."""
        if self._wall is None:
            now = self._true_time()
            wall = self._wall = _Reading(now, now)
            time.time = lambda: wall.at(self._true_time())
            time.time_ns = lambda: int(wall.at(self._true_ns() / 1e9) * 1e9)
        self._wall.set(self._true_time(), jump=jump, drift=drift)
        if not drift:
            return
        if self._trio is None:
            core: Any = trio._core  # noqa: SLF001 - Trio has no public API to replace a running clock
            runner = core._run.GLOBAL_RUN_CONTEXT.runner  # noqa: SLF001 - see above
            self._trio = runner.clock = _TrioClock(runner.clock)
        self._trio.reading.set(self._trio.true.current_time(), drift=drift)

    def restore(self) -> None:
        """Restore the wall clock; Trio's clock ends with its run."""
        if self._wall is not None:
            time.time, time.time_ns = self._true_time, self._true_ns
            self._wall = None


class OfClock(OfMembers):
    """Builder of clock faults in the named processes: `faults.clock(members)`."""

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward by `seconds`, or back if negative. It must not affect deadlines."""
        self._faults.plan(ClockFault(self._where, jump=float(seconds)))

    def drift(self, rate: float) -> Heal:
        """Let the clocks run `1 + rate` times as fast, those of deadlines included: -0.5 is half as fast.

        Returns:
            A function that restores the rate.
        """
        if rate <= -1:
            raise ValueError(f"drift must be above -1, as a clock cannot stand still or run backwards, got {rate!r}")
        return self._faults.plan(ClockFault(self._where, drift=float(rate)))

    def skew(self, seconds: float) -> None:
        """Set each wall clock forward or back by at most `seconds`; the seed draws the amount."""
        self._faults.plan(ClockFault(self._where, skew=checked_amount("seconds", seconds)))
