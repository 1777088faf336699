"""Metrics of one process: logged values, counters, gauges and histograms, with the coordinates of the running code.

MX-1 No call here waits for another process, a device or a file, or raises because of load: when the ring is full, the
     oldest samples are dropped and counted.
MX-2 Samples and series are bounded. A series beyond the bound is dropped and counted, or takes the place of those of
     the member that was added first.
MX-3 Functions are safe in any thread. Readers take no lock, so a signal handler may read.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from trimesh import limits
from trimesh._runtime.actors.context import context_of_code, proc_of_task
from trimesh.plain_numbers import real_number, whole_number

if TYPE_CHECKING:
    from trimesh._runtime.actors.context import ExecutionContext
    from trimesh._runtime.life.proc import Proc


_log = logging.getLogger("trimesh")

VALUE, COUNTER, GAUGE, HISTOGRAM = "value", "counter", "gauge", "histogram"
_WORD: Final = 1 << 63

Sample: TypeAlias = "tuple[int, float, int | None, MemberMetrics, dict[str, float]]"
"""Number, Unix time, step, member and values of one call of `log`."""


class MemberMetrics:
    """Series of one actor of this process, or of code outside of actors.

    Attributes:
        mesh, point, incarnation: Its coordinates; an empty mesh for code outside of actors.
        metrics: The metrics of the process.
        latest: Newest sample of each logged name.
        totals, levels: Values of counters and of gauges, by name.
        spreads: Histograms, by name.
    """

    __slots__ = ("incarnation", "latest", "levels", "mesh", "metrics", "point", "spreads", "totals")

    def __init__(
        self, metrics: Metrics, mesh: str = "", point: dict[str, int] | None = None, incarnation: int = 0
    ) -> None:
        self.metrics = metrics
        self.mesh = mesh
        self.point = point or {}
        self.incarnation = incarnation
        self.latest: dict[str, Sample] = {}
        self.totals: dict[str, float] = {}
        self.levels: dict[str, tuple[float, float]] = {}
        self.spreads: dict[str, Distribution] = {}

    def names(self) -> list[tuple[str, str]]:
        """Return name and kind of each series."""
        kinds = ((self.latest, VALUE), (self.totals, COUNTER), (self.levels, GAUGE), (self.spreads, HISTOGRAM))
        return [(name, kind) for table, kind in kinds for name in list(table)]

    @property
    def size(self) -> int:
        """Number of series."""
        return len(self.latest) + len(self.totals) + len(self.levels) + len(self.spreads)


class Distribution:
    """State of one histogram of one member."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class Metrics:
    """All metrics of one process.

    Args:
        now: Returns the Unix time; virtual in a simulation.

    Attributes:
        own: Series of code outside of actors.
        members: Series of each actor, by mesh, rank and incarnation, the one added first at the front.
        ring: The newest samples that no reader has taken.
        dropped_series: Number of refused series.
        retries: Calls that this process has sent again by `options(retry=)`.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self.own = MemberMetrics(self)
        self.members: dict[tuple[str, int, int], MemberMetrics] = {}
        self.ring: deque[Sample] = deque(maxlen=limits.METRIC_SAMPLES)
        self.lock = threading.RLock()  # a finalizer may count while its thread does
        self.new_number: Callable[[], int] = itertools.count(1).__next__
        self.dropped_series = self.retries = 0
        self._series = 0
        self._taken = self._dropped = 0

    @property
    def dropped(self) -> int:
        """Number of samples that were dropped because no reader took them in time."""
        first = next(iter(self.ring), None)
        return self._dropped + (0 if first is None else max(0, first[0] - 1 - self._taken))

    def take(self) -> list[Sample]:
        """Remove and return the samples, oldest first."""
        found = list[Sample]()
        while True:
            try:
                one = self.ring.popleft()
            except IndexError:
                return found
            self._dropped += max(0, one[0] - 1 - self._taken)
            self._taken = max(self._taken, one[0])
            found.append(one)

    def all_members(self) -> list[MemberMetrics]:
        """Return the members, code outside of actors first."""
        return [self.own, *list(self.members.values())]

    def member_of(self, context: ExecutionContext) -> MemberMetrics:
        """Return the series of the actor of an execution context."""
        point = context.point
        key = (context.mesh, point.rank, context.incarnation)
        with self.lock:
            found = self.members.get(key)
            if found is None:
                labels = {label: point[label] for label in point}
                found = self.members[key] = MemberMetrics(self, context.mesh, labels, context.incarnation)
        context.metrics = found
        return found

    def admit(self, member: MemberMetrics, name: str, kind: str) -> bool:
        """Return whether a new series has room; make room by removing the oldest other member (MX-2).

        Raises:
            ValueError: The name is not allowed, or has another kind.
        """
        with self.lock:
            _check_name(name, kind)
            if self._series >= limits.METRIC_SERIES:
                for key, other in list(self.members.items()):
                    if other is not member:
                        del self.members[key]
                        break
                self._series = sum(one.size for one in self.all_members())
            if self._series >= limits.METRIC_SERIES:
                self.dropped_series += 1
                if self.dropped_series == 1:
                    _log.warning(
                        "a process keeps at most %d series of metrics; %r and other new names are dropped: put what "
                        "varies into the value, not into the name",
                        limits.METRIC_SERIES,
                        name,
                    )
                return False
            self._series += 1
        for listener in on_series:
            listener(name, kind)
        return True


_of_process = Metrics()
on_series: list[Callable[[str, str], None]] = []
"""Called with name and kind of each new series."""


def metrics_of(proc: Proc) -> Metrics:
    """Return the metrics of a new process: those of this operating system process, or its own in a simulation."""
    if not proc.is_simulated:
        return _of_process
    return Metrics(lambda: _SIMULATED_EPOCH + proc.now())


_SIMULATED_EPOCH: Final = 1_000_000_000.0
"""Unix time at which simulations begin, as for the clocks of simulated actors."""


def _forget_in_child() -> None:
    """Start empty in a forked child: another thread may have held the lock."""
    global _of_process  # noqa: PLW0603 - one for each process
    _of_process = Metrics()
    _registry.clear()


def _member_here() -> MemberMetrics:
    """Return the series of the running code."""
    context = context_of_code.get()
    if context is not None:
        return context.metrics or metrics_here().member_of(context)
    return metrics_here().own


def metrics_here() -> Metrics:
    """Return the metrics of the process that the running code belongs to."""
    proc = proc_of_task.get()
    return _of_process if proc is None else proc.metrics


# ---- logged values ---------------------------------------------------------------------------------------------------


def log(values: Mapping[str, float], *, step: int | None = None) -> None:
    """Log numbers with the coordinates of the running code: `trimesh.log({"loss": 0.25, "reward": 3}, step=n)`.

    They show on the page, in `trimesh metrics`, `trimesh query`, `log_to` and the flight record. Works in the
    controller, in actors, in their threads and asyncio tasks, and without an open mesh. A plain thread of an actor has
    the coordinates of its process.

    Args:
        values: Numbers by name, at most `limits.METRIC_VALUES` a call: Python's, numpy's, or tensors of one element on
            the CPU. A tensor on another device is refused: reading it would wait for the device.
        step: Step that they belong to.

    Raises:
        TypeError: A name, a value or the step has another type.
        ValueError: A name is not allowed, or there are too many values.

    Blocking: never; some 1 us for three values. If they are not collected in time, the oldest are dropped and counted.
    """
    # `_member_here`, written out: each call costs the program.
    context = context_of_code.get()
    member = _member_here() if context is None else context.metrics or _member_here()
    latest, metrics = member.latest, member.metrics
    try:
        for name, value in values.items():
            kind = type(value)
            if (kind is not float and kind is not int) or name not in latest:
                kept = _admitted(member, values)
                break
        else:
            kept = dict(values)
    except (AttributeError, TypeError) as error:
        if isinstance(values, Mapping):
            raise
        raise TypeError(
            f'log takes a mapping from names to numbers, got {type(values).__name__}: write log({{"loss": loss}})'
        ) from error
    if step is not None and (type(step) is not int or not -_WORD <= step < _WORD):
        step = _checked_step(step)
    sample = (metrics.new_number(), metrics.now(), step, member, kept)
    for name in kept:
        latest[name] = sample
    metrics.ring.append(sample)


def _admitted(member: MemberMetrics, values: Mapping[str, Any]) -> dict[str, float]:
    """Check values, some of which are new or no plain numbers; return those whose series have room."""
    if len(values) > limits.METRIC_VALUES:
        raise ValueError(
            f"log takes at most {limits.METRIC_VALUES} values in one call, got {len(values)}: log summaries, and "
            "arrays as files"
        )
    found = {name: _number(name, value, "log") for name, value in values.items()}
    metrics = member.metrics
    return {name: value for name, value in found.items() if name in member.latest or metrics.admit(member, name, VALUE)}


def _number(name: object, value: Any, what: str) -> float:
    if not isinstance(name, str):
        raise TypeError(f"names of metrics must be texts, got {name!r}")
    if isinstance(value, bool):
        return int(value)
    found = real_number(value)
    return _one_element(name, value, what) if found is None else found


def _one_element(name: str, value: Any, what: str) -> float:
    """Return the number in a tensor or array of one element.

    Raises:
        TypeError: It is something else, or its memory is not the processor's.
    """
    device = getattr(value, "device", None)
    place = getattr(device, "type", "cpu")
    count: Any = getattr(value, "numel", None)
    size = count() if callable(count) else getattr(value, "size", None)
    if place != "cpu":
        raise TypeError(
            f"{what} takes numbers, got a tensor on {device} for {name!r}: reading it waits until the device has "
            f"computed it, so {what} does not; write .item() where that wait does no harm"
        )
    if size == 1 and type(value).__name__ in ("Tensor", "Parameter", "ndarray"):
        found = real_number(value.item())
        if found is not None:
            return found
    if size is not None and size != 1:
        raise TypeError(f"{what} takes one number for a name, got {size} elements for {name!r}: {what} their mean")
    if isinstance(value, Mapping):
        raise TypeError(f'{what} takes numbers, got a mapping for {name!r}: write one level, "{name}/part"')
    raise TypeError(
        f"{what} takes numbers, got {type(value).__name__} for {name!r}: convert it with float(); tensors of a mesh "
        "have to be fetched first"
    )


def _checked_step(step: object) -> int:
    found = whole_number(step)
    if found is None:
        raise TypeError(f"step must be a whole number or None, got {step!r}")
    if not -_WORD <= found < _WORD:
        raise ValueError(f"step must have at most 64 bits, got {found}")
    return found


# ---- counters, gauges and histograms ---------------------------------------------------------------------------------


class Counter:
    """A number that only grows: `telemetry.counter("tokens").add(512)`. Each actor has its own; views add them up."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, amount: float = 1) -> None:
        """Add to the counter of the running actor, or of its process.

        Raises:
            TypeError: `amount` is not a number.
            ValueError: It is negative.
        """
        if type(amount) is not int and type(amount) is not float:
            amount = _number(self.name, amount, "add")
        if not amount >= 0:
            raise ValueError(f"a counter only grows, got {amount} for {self.name!r}: use telemetry.gauge")
        member = _member_here()
        totals = member.totals
        with member.metrics.lock:
            if self.name in totals:
                totals[self.name] += amount
            elif member.metrics.admit(member, self.name, COUNTER):
                totals[self.name] = amount

    def __reduce__(self) -> tuple[Any, ...]:
        return counter, (self.name,)


class Gauge:
    """A number that goes up and down: `telemetry.gauge("queue").set(12)`. Only its newest value is kept."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def set(self, value: float) -> None:
        """Set the gauge of the running actor, or of its process.

        Raises:
            TypeError: `value` is not a number.
        """
        if type(value) is not int and type(value) is not float:
            value = _number(self.name, value, "set")
        member = _member_here()
        if self.name in member.levels or member.metrics.admit(member, self.name, GAUGE):
            member.levels[self.name] = (member.metrics.now(), value)

    def __reduce__(self) -> tuple[Any, ...]:
        return gauge, (self.name,)


class Histogram:
    """Distribution of a number: `telemetry.histogram("seconds").record(0.2)`. It keeps a count for each bucket."""

    __slots__ = ("bounds", "name")

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.bounds = bounds

    def record(self, value: float) -> None:
        """Count a value in the histogram of the running actor, or of its process. A NaN counts in the last bucket.

        Raises:
            TypeError: `value` is not a number.
        """
        if type(value) is not int and type(value) is not float:
            value = _number(self.name, value, "record")
        member = _member_here()
        spreads = member.spreads
        with member.metrics.lock:
            found = spreads.get(self.name)
            if found is None:
                if not member.metrics.admit(member, self.name, HISTOGRAM):
                    return
                found = spreads[self.name] = Distribution(self.bounds)
            found.counts[bisect_left(self.bounds, value) if value == value else -1] += 1  # noqa: PLR0124 - NaN
            found.total += value

    def __reduce__(self) -> tuple[Any, ...]:
        return histogram, (self.name, self.bounds)


_I = TypeVar("_I", Counter, Gauge, Histogram)
_registry: dict[str, tuple[str, Counter | Gauge | Histogram | None]] = {}
"""Kind of each name, and its instrument: one name has one kind in a process."""


def counter(name: str) -> Counter:
    """Return the counter of a name; make it on first use.

    Raises:
        TypeError: The name is no text.
        ValueError: It is not allowed, or has another kind.
    """
    return _instrument(name, COUNTER, Counter, lambda: Counter(name))


def gauge(name: str) -> Gauge:
    """Return the gauge of a name; make it on first use.

    Raises:
        TypeError: The name is no text.
        ValueError: It is not allowed, or has another kind.
    """
    return _instrument(name, GAUGE, Gauge, lambda: Gauge(name))


def histogram(name: str, bounds: Sequence[float] | None = None) -> Histogram:
    """Return the histogram of a name; make it on first use.

    Args:
        name: Its name.
        bounds: Upper bounds of the buckets, rising, at most `limits.METRIC_BOUNDS`; another bucket holds what is
            above. None for 1-2-5 steps from 0.00001 to 5,000, made for seconds.

    Raises:
        TypeError: The name is no text, or a bound no number.
        ValueError: The name is not allowed or has another kind; the bounds do not rise, are too many, or differ from
            those of its first use.
    """
    edges = limits.LATENCY_BOUNDS if bounds is None else tuple(_number(name, one, "histogram") for one in bounds)
    if not 1 <= len(edges) <= limits.METRIC_BOUNDS or any(not a < b for a, b in itertools.pairwise(edges)):
        raise ValueError(
            f"bounds of a histogram must rise, from 1 to {limits.METRIC_BOUNDS} of them, got {list(edges)[:5]}... for "
            f"{name!r}"
        )
    found = _instrument(name, HISTOGRAM, Histogram, lambda: Histogram(name, edges))
    if bounds is not None and found.bounds != edges:
        raise ValueError(f"{name!r} has other bounds since its first use: give the same ones, or another name")
    return found


def _instrument(name: str, kind: str, cls: type[_I], make: Callable[[], _I]) -> _I:
    known = _registry.get(name) if isinstance(name, str) else None
    if known is not None and isinstance(known[1], cls):
        return known[1]
    _check_name(name, kind)
    found = make()
    _note(name, kind, found)
    return found


def _note(name: str, kind: str, instrument: Counter | Gauge | Histogram | None) -> None:
    while len(_registry) >= limits.METRIC_SERIES:
        _registry.pop(next(iter(_registry)), None)
    _registry[name] = kind, instrument


def _check_name(name: object, kind: str) -> None:
    """Check that a name is allowed and has no other kind; note its kind."""
    if not isinstance(name, str):
        raise TypeError(f"names of metrics must be texts, got {name!r}")
    if not name or len(name) > limits.METRIC_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"a name of a metric has 1 to {limits.METRIC_NAME_CHARS} printable characters, got {name[:64]!r}"
        )
    if name.startswith("trimesh"):
        raise ValueError(f"names that begin with trimesh are those of the runtime, got {name!r}: use another one")
    known = _registry.get(name)
    if known is None:
        _note(name, kind, None)
    elif known[0] != kind:
        raise ValueError(f"{name!r} is a {known[0]} here, so it cannot be a {kind}, too: use another name")


os.register_at_fork(after_in_child=_forget_in_child)
