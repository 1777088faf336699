"""Virtual clocks of simulated actors: one for each place, which a test can set wrong.

Trio's clock is virtual already. The clocks of `time`, `datetime` and `logging` follow from it, for an actor's own code
and for libraries, except libraries that wait in real time. `time.sleep` keeps its process from receiving messages for
that time, or, in a thread, ends that much later.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import logging
import os
import sched
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from trimesh._runtime.life.current import find_proc_anywhere
from trimesh.ids import ProcId
from trimesh.testing.plans.fault import Place
from trimesh.testing.simulated.guards import Change, is_in_actor, reads_virtual_clock

EPOCH_SECONDS: Final = 1_000_000_000.0
"""Value of `time.time` when a simulation begins: the 9th of September 2001."""

_NS: Final = 1_000_000_000

_STEADY: Final = ("monotonic", "perf_counter", "process_time", "thread_time")
"""Clocks that count from the start of the run; also those of processor time, as if no code ever waited."""

_WALL_CLOCKS: Final = frozenset({time.CLOCK_REALTIME, time.CLOCK_TAI})


@attrs.define(eq=False)
class PlaceClock:
    """The clock of one place: it reads `base + (now - since) * (1 + drift)`, where `now` is Trio's time.

    Attributes:
        wall: Base of the wall clock.
        steady: Base of the monotonic clock, which cannot be set.
        drift: Share by which it runs faster than Trio's.
        has_drifted: Whether it does, or did: deadlines from then may still run.
    """

    wall: float = EPOCH_SECONDS
    steady: float = 0.0
    since: float = 0.0
    drift: float = 0.0
    has_drifted: bool = False

    def gone(self) -> float:
        """Return the seconds that it has counted since it was set."""
        return (trio.current_time() - self.since) * (1 + self.drift)

    def set(self, *, jump: float = 0.0, drift: float = 0.0) -> None:
        """Set it forward, and let it run faster from now on."""
        gone = self.gone()
        self.wall, self.steady, self.since = self.wall + gone + jump, self.steady + gone, trio.current_time()
        self.drift += drift
        self.has_drifted = self.has_drifted or drift != 0


@attrs.define(eq=False)
class SimTime:
    """All clocks of one simulated run.

    Attributes:
        place_of: Function from a process to its place.
        stall: Function that keeps the processes of a place from receiving messages for some seconds.
        in_thread: Seconds that the running thread has slept; None if no thread runs.
    """

    place_of: Callable[[ProcId], Place]
    stall: Callable[[Place, float], None]
    in_thread: float | None = None
    _clocks: dict[Place, PlaceClock] = attrs.field(factory=dict[Place, PlaceClock])
    _busy_until: dict[Place, float] = attrs.field(factory=dict[Place, float])

    def clock(self, place: Place) -> PlaceClock:
        return self._clocks.setdefault(place, PlaceClock())

    def drift(self, place: Place) -> float:
        """Return the share by which the clock of a place runs faster than Trio's."""
        clock = self._clocks.get(place)
        return 0.0 if clock is None else clock.drift

    def has_drifted(self, place: Place) -> bool:
        clock = self._clocks.get(place)
        return clock is not None and clock.has_drifted

    def _here(self) -> Place:
        proc = find_proc_anywhere()
        return None if proc is None else self.place_of(proc.proc_id)

    def spend(self, place: Place, seconds: float) -> None:
        """Let a process compute, or sleep: it receives no messages for `seconds`, after its earlier computing."""
        if seconds > 0:
            busy = self._busy(place) + seconds
            self._busy_until[place] = trio.current_time() + busy
            self.stall(place, busy)

    def _busy(self, place: Place) -> float:
        """Return the seconds for which a place is still busy: its code is that far ahead of Trio's time."""
        return max(0.0, self._busy_until.get(place, 0.0) - trio.current_time())

    def _ahead(self, place: Place) -> float:
        return self._busy(place) if self.in_thread is None else self.in_thread

    def wall(self) -> float:
        """Return `time.time` of the running process."""
        place = self._here()
        clock = self.clock(place)
        return clock.wall + clock.gone() + self._ahead(place)

    def steady(self) -> float:
        """Return `time.monotonic` of the running process."""
        place = self._here()
        clock = self.clock(place)
        return clock.steady + clock.gone() + self._ahead(place)

    def _of_now(self, real: Callable[..., Any], place: int, value: Callable[[], Any]) -> Callable[..., Any]:
        """Return a function that formats the virtual time if its argument at this place is absent or None."""

        def ask(*given: Any) -> Any:
            if (len(given) <= place or given[place] is None) and reads_virtual_clock(2):
                return real(*given[:place], value())
            return real(*given)

        return ask

    def _of_clock(self, real: Callable[[int], Any], wall: Callable[[], Any], steady: Callable[[], Any]) -> Any:
        def ask(clock: int) -> Any:
            if reads_virtual_clock(2):
                return wall() if clock in _WALL_CLOCKS else steady()
            return real(clock)

        return ask

    def _sleeping(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            if not is_in_actor():  # for libraries in an actor, too, which must not block all other actors
                real(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")
            elif self.in_thread is not None:
                self.in_thread += seconds
            else:
                self.spend(self._here(), seconds)

        return sleep

    def _record(self, real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def init(record: logging.LogRecord, *args: Any, **kwargs: Any) -> None:
            real(record, *args, **kwargs)
            proc = find_proc_anywhere()
            if proc is not None and proc.is_simulated:  # also in the test itself, so that all lines have one clock
                wall = self.wall()
                record.created, record.msecs = wall, float(int(wall % 1 * 1000))
                record.relativeCreated = (wall - EPOCH_SECONDS) * 1000

        return init

    def _times(self) -> os.times_result:
        steady = self.steady()
        return os.times_result((steady, 0.0, 0.0, 0.0, steady))

    def changes(self) -> list[Change]:
        """Return the patches that give the code of actors these clocks."""
        wall_ns, steady_ns = lambda: round(self.wall() * _NS), lambda: round(self.steady() * _NS)
        changes: list[Change] = [(time, name, _for_actors(getattr(time, name), self.steady)) for name in _STEADY]
        changes += [(time, f"{name}_ns", _for_actors(getattr(time, f"{name}_ns"), steady_ns)) for name in _STEADY]
        localtime = time.localtime
        return [
            *changes,
            (time, "time", _for_actors(time.time, self.wall)),
            (time, "time_ns", _for_actors(time.time_ns, wall_ns)),
            (time, "clock_gettime", self._of_clock(time.clock_gettime, self.wall, self.steady)),
            (time, "clock_gettime_ns", self._of_clock(time.clock_gettime_ns, wall_ns, steady_ns)),
            *(
                (time, name, self._of_now(getattr(time, name), 0, self.wall))
                for name in ("gmtime", "localtime", "ctime")
            ),
            (time, "asctime", self._of_now(time.asctime, 0, lambda: localtime(self.wall()))),
            (time, "strftime", self._of_now(time.strftime, 1, lambda: localtime(self.wall()))),
            (time, "sleep", self._sleeping(time.sleep)),
            (sched.scheduler, "__init__", _scheduler_init(sched.scheduler.__init__)),
            (os, "times", _for_actors(os.times, self._times)),
            (logging.LogRecord, "__init__", self._record(logging.LogRecord.__init__)),
        ]


def _scheduler_init(real: Callable[..., None]) -> Callable[..., None]:
    """Return an initialiser with the current functions of `time`: the real defaults were bound at import."""

    @functools.wraps(real)
    def init(scheduler: Any, timefunc: Any = None, delayfunc: Any = None) -> None:
        real(
            scheduler, time.monotonic if timefunc is None else timefunc, time.sleep if delayfunc is None else delayfunc
        )

    return init


def _for_actors(real: Callable[[], Any], virtual: Callable[[], Any]) -> Callable[[], Any]:
    def ask() -> Any:
        return virtual() if reads_virtual_clock(2) else real()

    return ask


@contextmanager
def virtual_dates(wall: Callable[[], float]) -> Generator[None, None, None]:
    """Let `datetime.now`, `utcnow` and `today` return the virtual time in actors.

    They are written in C and read the system's clock. Attributes of a C type cannot be set, so this changes its dict.
    """
    [of_datetime] = gc.get_referents(datetime.datetime.__dict__)
    [of_date] = gc.get_referents(datetime.date.__dict__)
    real_now, real_utcnow, real_today = of_datetime["now"], of_datetime["utcnow"], of_date["today"]

    def now(cls: Any, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(wall(), tz) if reads_virtual_clock(2) else real_now.__get__(None, cls)(tz)

    def utcnow(cls: Any) -> Any:
        return cls.utcfromtimestamp(wall()) if reads_virtual_clock(2) else real_utcnow.__get__(None, cls)()

    def today(cls: Any) -> Any:
        return cls.fromtimestamp(wall()) if reads_virtual_clock(2) else real_today.__get__(None, cls)()

    of_datetime["now"], of_datetime["utcnow"] = classmethod(now), classmethod(utcnow)
    of_date["today"] = classmethod(today)
    _forget_lookups()
    try:
        yield
    finally:
        of_datetime["now"], of_datetime["utcnow"], of_date["today"] = real_now, real_utcnow, real_today
        _forget_lookups()


def _forget_lookups() -> None:
    """Empty the interpreter's cache of the attributes of these types."""
    for cls in (datetime.date, datetime.datetime):
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))
