"""The clocks that code in simulated actors reads: virtual, and each place has its own, which a test can set wrong.

Trio's clock is virtual already. Here are those of the modules `time` and `datetime`: what an actor's own code asks them
follows from Trio's; what the standard library asks is answered as ever. `time.sleep` keeps its process from taking
messages for so long, or, in a thread, ends that much later.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import random
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import attrs
import trio

from trimesh._runtime.life.current import find_proc_anywhere
from trimesh.ids import ProcId
from trimesh.testing.plans.vocabulary import ClockFault, Place
from trimesh.testing.simulated.guards import is_actor_code, is_in_actor, replaced

EPOCH_SECONDS: Final = 1_000_000_000.0
"""What `time.time` says when a simulation begins: the 9th of September 2001."""

_NS: Final = 1_000_000_000
_INSTALLED: Final = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()})


@attrs.define(eq=False)
class PlaceClock:
    """The clock of one place: it reads `base + (now - since) * (1 + drift)`, where `now` is Trio's time.

    Attributes:
        wall: Base of the wall clock.
        steady: Base of the monotonic one, which cannot be set.
        drift: How much faster than Trio's it runs, as a share.
    """

    wall: float = EPOCH_SECONDS
    steady: float = 0.0
    since: float = 0.0
    drift: float = 0.0

    def gone(self) -> float:
        """Return the seconds that it counts since it was set."""
        return (trio.current_time() - self.since) * (1 + self.drift)

    def set(self, *, jump: float, drift: float) -> None:
        """Set it forward, and let it run faster from now on."""
        gone = self.gone()
        self.wall, self.steady, self.since = self.wall + gone + jump, self.steady + gone, trio.current_time()
        self.drift += drift


@attrs.define(eq=False)
class SimTime:
    """All clocks of one simulated run.

    Attributes:
        place_of: Where a process belongs.
        stall: Keeps the processes of a place from taking messages for so many seconds.
        in_thread: Seconds that the thread which runs now has slept; None where no thread runs.
    """

    place_of: Callable[[ProcId], Place]
    stall: Callable[[Place, float], None]
    in_thread: float | None = None
    _clocks: dict[Place, PlaceClock] = attrs.field(factory=dict[Place, PlaceClock])
    _busy_until: dict[Place, float] = attrs.field(factory=dict[Place, float])

    def clock(self, place: Place) -> PlaceClock:
        """Return the clock of a place."""
        return self._clocks.setdefault(place, PlaceClock())

    def set_clocks(self, fault: ClockFault, draw: random.Random) -> None:
        """Set the clocks of some places wrong."""
        for place, jump in zip(fault.where.places, fault.jumps(draw), strict=True):
            self.clock(place).set(jump=jump, drift=fault.drift)

    def drift(self, place: Place) -> float:
        """Return how much faster than Trio's the clock of a place runs."""
        clock = self._clocks.get(place)
        return 0.0 if clock is None else clock.drift

    def _here(self) -> Place:
        proc = find_proc_anywhere()
        return None if proc is None else self.place_of(proc.proc_id)

    def spend(self, place: Place, seconds: float) -> None:
        """Let a process compute, or sleep: it takes no messages for so long, after what it does already."""
        if seconds > 0:
            busy = self._busy(place) + seconds
            self._busy_until[place] = trio.current_time() + busy
            self.stall(place, busy)

    def _busy(self, place: Place) -> float:
        """Return for how long a place is busy yet: its code is so far ahead of Trio's time."""
        return max(0.0, self._busy_until.get(place, 0.0) - trio.current_time())

    def _ahead(self, place: Place) -> float:
        return self._busy(place) if self.in_thread is None else self.in_thread

    def wall(self) -> float:
        """Return what `time.time` says in the running process."""
        place = self._here()
        clock = self.clock(place)
        return clock.wall + clock.gone() + self._ahead(place)

    def steady(self) -> float:
        """Return what `time.monotonic` says there."""
        place = self._here()
        clock = self.clock(place)
        return clock.steady + clock.gone() + self._ahead(place)

    def _of_now(self, real: Callable[[float], Any]) -> Callable[..., Any]:
        def ask(*given: float) -> Any:
            return real(self.wall()) if is_actor_code(2) and not given else real(*given)

        return ask

    def _sleeping(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            if not is_in_actor():  # a library that sleeps for an actor may not stop all others either
                real(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")
            elif self.in_thread is not None:
                self.in_thread += seconds
            else:
                self.spend(self._here(), seconds)

        return sleep

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """Have the code of actors read these clocks, while a simulation runs."""
        clocks: dict[str, Callable[[], float]] = {
            "time": self.wall,
            "time_ns": lambda: round(self.wall() * _NS),
            "monotonic": self.steady,
            "monotonic_ns": lambda: round(self.steady() * _NS),
            "perf_counter": self.steady,
            "perf_counter_ns": lambda: round(self.steady() * _NS),
        }
        virtual = {name: _for_actors(getattr(time, name), function) for name, function in clocks.items()}
        for name in ("gmtime", "localtime", "ctime"):
            virtual[name] = self._of_now(getattr(time, name))
        virtual["sleep"] = self._sleeping(time.sleep)
        changes = [(time, name, function) for name, function in virtual.items()]
        of_real = {id(getattr(time, name)): function for name, function in virtual.items()}
        for module in _own_modules():  # those that have them by `from time import ...`
            names = vars(module)
            if not of_real.keys().isdisjoint(map(id, names.values())):
                changes += [(module, name, of_real[id(held)]) for name, held in names.items() if id(held) in of_real]
        with replaced(changes), _virtual_dates(self.wall):
            yield


def _for_actors(real: Callable[[], float], virtual: Callable[[], float]) -> Callable[..., Any]:
    def ask() -> float:
        return virtual() if is_actor_code(2) else real()

    return ask


_own: Final[set[str]] = set()
"""Names of modules of the program that is tested, and of its tests."""

_installed: Final[set[str]] = {"__main__"}
"""Names of those that a package manager has installed. Thousands, so they are looked at once, not in each run."""


def _own_modules() -> list[ModuleType]:
    """Return the modules that no package manager has installed: those of the program that is tested, and its tests."""
    for name in sys.modules.keys() - _own - _installed:
        (_own if _is_own(name) else _installed).add(name)
    main = ("__main__",) if _is_own("__main__") else ()  # a notebook, or a test, gives it another one
    return [module for name in (*_own, *main) if (module := sys.modules.get(name)) is not None]


def _is_own(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED) and name.partition(".")[0] != "trimesh"


@contextmanager
def _virtual_dates(wall: Callable[[], float]) -> Generator[None, None, None]:
    """Let `datetime.now` and `utcnow` say the virtual time in actors.

    They are written in C and ask the system, and the attributes of a type of C cannot be set: so its dictionary is.
    """
    [attributes] = gc.get_referents(datetime.datetime.__dict__)
    real_now, real_utcnow = attributes["now"], attributes["utcnow"]

    def now(cls: Any, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(wall(), tz) if is_actor_code(2) else real_now.__get__(None, cls)(tz)

    def utcnow(cls: Any) -> Any:
        return cls.utcfromtimestamp(wall()) if is_actor_code(2) else real_utcnow.__get__(None, cls)()

    attributes["now"], attributes["utcnow"] = classmethod(now), classmethod(utcnow)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
    try:
        yield
    finally:
        attributes["now"], attributes["utcnow"] = real_now, real_utcnow
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
