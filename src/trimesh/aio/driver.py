"""Drivers: run Trio inside an asyncio loop, in one thread.

A driver calls Trio's run generator around each wait of the loop. No thread waits for Trio's descriptors.

    DV-1 a turn of the loop runs at most one turn of Trio before its wait and one after it.
    DV-2 the loop waits no longer than until the next Trio deadline.
    DV-3 descriptors that Trio tasks wait for wake the loop.

`SelectorDriver` wraps the `select` of asyncio's own loops, so that the transport can spin before the loop sleeps.
`CallbackDriver` serves other loops (uvloop) by reader and timer callbacks, without spinning.
"""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import outcome
import trio

from trimesh._transport.native.loop_waits import loop_wait

if TYPE_CHECKING:
    from trimesh._transport.native.loop_waits import AroundWait


# ---- private names of Trio that drivers and stand-ins need, looked up once -------------------------------------------

# If a release of Trio lacks one, `NAMES` is None. Then Trio is an ordinary guest, which waits in a thread, and Trio
# tasks do the work of asyncio tasks.

RUN: Final[dict[str, tuple[str, ...]]] = {
    "Runner": (
        "runq",
        "deadlines",
        "clock",
        "io_manager",
        "guest_tick_scheduled",
        "waiting_for_idle",
        "is_guest",
        "main_task_outcome",
    ),
    "Deadlines": ("next_deadline",),
    "TheIOManager": ("_epoll", "get_events"),
    "Task": (
        "_abort_func",
        "_cancel_points",
        "_cancel_status",
        "_schedule_points",
        "_attempt_delivery_of_any_pending_cancel",
    ),
    "CancelStatus": ("effectively_cancelled",),
    "GuestState": ("unrolled_run_gen", "runner", "done_callback"),
}
"""Classes of `trio._core._run`, and the attributes of each that are used."""
TRAPS: Final[dict[str, tuple[str, ...]]] = {"WaitTaskRescheduled": ("abort_func",)}
"""Classes of `trio._core._traps`, likewise."""


class TrioNames(NamedTuple):
    """Private objects of Trio.

    Attributes:
        context: Thread-local; its attributes `task` and `runner` are the running task and run.
        library: Thread-local; its attribute `name` is that of the running library, for `sniffio`.
        waits: Class of the trap of `wait_task_rescheduled`.
        yields: Trap of `cancel_shielded_checkpoint`.
        run_code: Code of the run generator.
    """

    context: Any
    library: Any
    waits: type[Any]
    yields: Any
    run_code: types.CodeType


def find_names() -> TrioNames | None:
    """Return the private objects of this release of Trio; None if one is missing."""
    try:
        core: Any = trio._core
        run, traps = core._run, core._traps
        has_all = all(_has(module, table) for module, table in ((run, RUN), (traps, TRAPS)))
        names = TrioNames(
            run.GLOBAL_RUN_CONTEXT,
            run.sniffio_library,
            traps.WaitTaskRescheduled,
            traps.CancelShieldedCheckpoint,
            getattr(run.unrolled_run, "__wrapped__", run.unrolled_run).__code__,
        )
        has_library = hasattr(names.library, "name") and hasattr(names.library, "__dict__")
        return names if has_all and has_library and _keeps_task(names.context) else None
    except (AttributeError, TypeError):
        return None


def _has(module: Any, table: dict[str, tuple[str, ...]]) -> bool:
    return all(_has_name(getattr(module, holder), name) for holder, names in table.items() for name in names)


def _has_name(holder: type[Any], name: str) -> bool:
    return hasattr(holder, name) or name in {field.name for field in getattr(holder, "__attrs_attrs__", ())}


def _keeps_task(context: Any) -> bool:
    """Return whether the running task of this thread is `context.task`."""
    here: dict[str, Any] = context.__dict__
    before, probe = here.get("task"), object()
    here["task"] = probe
    try:
        return trio.lowlevel.current_task() is probe
    except RuntimeError:
        return False
    finally:
        if before is None:
            del here["task"]
        else:
            here["task"] = before


NAMES: TrioNames | None = find_names()


# ---- drivers ---------------------------------------------------------------------------------------------------------


class _Some(list[Any]):
    """An empty list of events that is true: the wait was cut short, so Trio does not count its tasks as idle."""

    def __bool__(self) -> bool:
        return True


SOME_EVENTS: Any = _Some()
_NO_EVENTS: Final[list[Any]] = []
_names: Final[Any] = NAMES
_MANY: Final = 1 << 30
_LONGEST_WAIT_SECONDS: Final = 86400.0
"""As in Trio and asyncio: epoll refuses waits of more than 24 days."""


class LoopDriver:
    """Runs the turns of one Trio run inside a loop.

    Args:
        loop: The running loop.
        runner: Trio's `Runner`.
        steps: Trio's run generator; each `send` runs one turn.
        finished: Called with the outcome of the run.

    Attributes:
        is_ticking: Whether a turn of Trio is running.
        descriptor: The loop's epoll descriptor, or -1 if it is not known.
        around: Hooks around each wait of the loop; None while no transport is served.
        must_settle: Whether asyncio's side must call `settle_soon` after sending.
    """

    descriptor = -1
    must_settle = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runner: Any,
        steps: Generator[float, Any, None],
        finished: Callable[[outcome.Outcome[Any]], object],
    ) -> None:
        self.loop = loop
        self.is_ticking = False
        self.around: AroundWait | None = None
        self._runner = runner
        self._steps = steps
        self._finished = finished
        self._epoll_fd: int = runner.io_manager._epoll.fileno()
        self._is_over = False
        self._idle_at = math.inf

    def start(self) -> None:
        """Start driving the run, between two of its turns."""
        self.loop.add_reader(self._epoll_fd, self._readable)
        # Trio need not wake the loop: tasks become runnable in this thread only, and `runq` is read before a wait.
        self._runner.guest_tick_scheduled = True
        loop_wait.set(self)

    def stop(self) -> None:
        """Stop driving the run, between two of its turns."""
        self.loop.remove_reader(self._epoll_fd)
        if not self._is_over:
            loop_wait.set(None)

    def soon(self, function: Callable[[], object]) -> None:
        """Call `function` after the callbacks that can run now."""
        self.loop.call_soon(function)

    def settle_soon(self) -> None:
        """Flush and arm the transport soon: an asyncio task has sent something, or waits."""

    def waiting(self) -> int:
        """Return the number of callbacks of the loop that can run now."""
        return _MANY

    def is_quiet(self, seconds: float) -> bool:
        """Return whether no descriptor is ready, and no callback is due in the next seconds."""
        del seconds
        return False

    def tick(self, events: Any = SOME_EVENTS) -> None:
        """Run one turn of Trio."""
        if self.is_ticking or self._is_over:
            return
        self.is_ticking = True
        library = _names.library
        before, library.name = library.name, "trio"
        try:
            seconds = self._steps.send(events)
            if self._runner.waiting_for_idle:  # for tests: only the turn knows when they are idle
                self._idle_at = self.loop.time() + seconds
        except StopIteration:
            self._end(self._runner.main_task_outcome)
        except BaseException as error:  # noqa: BLE001 - the run is broken; `finished` reports it
            self._end(outcome.Error(error))
        finally:
            library.name = before
            self.is_ticking = False

    def _end(self, result: outcome.Outcome[Any]) -> None:
        self._is_over = True
        self.stop()
        self._finished(result)

    def _readable(self) -> None:
        """Pass events of Trio's descriptors to Trio, unless the wait of the loop has done so."""

    def _seconds_left(self) -> float:
        """Return the seconds until Trio's next deadline; `math.inf` for none."""
        runner = self._runner
        deadline = runner.deadlines.next_deadline()
        seconds: float = math.inf if deadline == math.inf else runner.clock.deadline_to_sleep_time(deadline)
        if runner.waiting_for_idle:
            seconds = min(seconds, self._idle_at - self.loop.time())
        return seconds


class SelectorDriver(LoopDriver):
    """Driver for asyncio's own loops: wraps `select` of their selector."""

    def __init__(
        self,
        loop: Any,
        runner: Any,
        steps: Generator[float, Any, None],
        finished: Callable[[outcome.Outcome[Any]], object],
    ) -> None:
        super().__init__(loop, runner, steps, finished)
        self._loop = loop
        self._selector = loop._selector
        self._real_select = self._selector.select
        self.descriptor = self._selector.fileno()
        self._came = 0  # ready descriptors whose callbacks have not run

    def start(self) -> None:
        super().start()
        self._selector.select = self._select

    def stop(self) -> None:
        if cast("dict[str, Any]", vars(self._selector)).get("select") == self._select:
            del self._selector.select
        super().stop()

    def is_quiet(self, seconds: float) -> bool:
        if self._came:
            return False
        timers = self._loop._scheduled
        return not timers or timers[0].when() - self._loop.time() > seconds

    def waiting(self) -> int:
        return len(self._loop._ready)

    def _seconds_to_timer(self) -> float:
        """Return the seconds until the loop's next timer; Trio tasks may have set one since the loop read it."""
        timers = self._loop._scheduled
        return timers[0].when() - self._loop.time() if timers else math.inf

    def _select(self, timeout: float | None = None) -> Any:
        """Run Trio, wait as the selector does, then hand over messages and run Trio again."""
        runner, around, ready = self._runner, self.around, self._loop._ready
        if runner.runq:
            self.tick()
        if self._is_over:
            return self._real_select(0)
        seconds = 0.0
        if not (runner.runq or ready or timeout == 0 or self._loop._stopping):
            seconds = max(min(self._seconds_left(), self._seconds_to_timer()), 0.0)
            if seconds != math.inf:
                seconds = min(seconds, _LONGEST_WAIT_SECONDS)
        if around is not None:
            around.before_io_wait(seconds)
        came = self._real_select(None if seconds == math.inf else seconds)
        mine: Any = []
        if came:
            others = [one for one in came if one[0].fd != self._epoll_fd]
            if len(others) < len(came):
                mine, came = runner.io_manager.get_events(0), others
        self._came = len(came)
        if around is not None:
            around.after_io_wait(seconds)
        if mine or runner.runq:
            self.tick(mine or SOME_EVENTS)
        elif self._seconds_left() <= 0:
            self.tick(_NO_EVENTS)
        self._came = 0
        return came


class CallbackDriver(LoopDriver):
    """Driver for other loops: readers and timers wake them, and a callback flushes messages."""

    must_settle = True
    _timer: asyncio.TimerHandle | None = None
    _will_settle = False

    def start(self) -> None:
        super().start()
        self._is_guest: bool = self._runner.is_guest
        self._runner.is_guest = True  # Trio makes its descriptor readable when a task can run, in a worker, too
        self.settle_soon()

    def stop(self) -> None:
        super().stop()
        self._runner.is_guest = self._is_guest
        if self._timer is not None:
            self._timer.cancel()

    def tick(self, events: Any = SOME_EVENTS) -> None:
        if not self.is_ticking:
            self._runner.guest_tick_scheduled = True
            super().tick(events)
            self.settle_soon()

    def settle_soon(self) -> None:
        if not self._will_settle and not self._is_over:
            self._will_settle = True
            self.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Run what can run, then flush, arm the bell and set the timer."""
        self._will_settle = False
        if self._is_over:
            return
        if self._runner.runq:
            self.tick()
            return
        if self.around is not None:
            self.around.before_io_wait(math.inf)
        self._runner.guest_tick_scheduled = False
        seconds = self._seconds_left()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds == math.inf else self.loop.call_later(max(seconds, 0), self.tick, _NO_EVENTS)

    def _readable(self) -> None:
        events = self._runner.io_manager.get_events(0)
        self._runner.guest_tick_scheduled = True
        if self.around is not None:
            self.around.after_io_wait(math.inf)
        self.tick(events or SOME_EVENTS)


WAIT_CODE: Final = SelectorDriver._select.__code__
"""Code of the frame in which a loop sleeps: a signal handler may raise there without breaking the Trio run."""


def driver_for(
    loop: asyncio.AbstractEventLoop,
    runner: Any,
    steps: Generator[float, Any, None],
    finished: Callable[[outcome.Outcome[Any]], object],
) -> LoopDriver:
    selector = getattr(loop, "_selector", None)
    has_names = all(hasattr(loop, name) for name in LOOP) and hasattr(selector, "fileno")
    # Only the type shows whether `select` can be set: a selector that wraps another has the `__dict__` of that one.
    takes_attributes = type(selector).__dictoffset__ != 0
    kind = SelectorDriver if has_names and takes_attributes else CallbackDriver
    return kind(loop, runner, steps, finished)


LOOP: Final = ("_selector", "_ready", "_scheduled", "_stopping")
"""Private attributes of asyncio's loops that `SelectorDriver` uses."""


def adopt_guest(
    loop: asyncio.AbstractEventLoop, driven: Callable[[LoopDriver], object]
) -> Callable[[Callable[[], object]], object]:
    """Return the `run_sync_soon_not_threadsafe` for a guest run: a driver takes the run over at the first call.

    Args:
        loop: The host loop.
        driven: Called with the driver; not called if Trio lacks a name that drivers need.
    """
    taken: list[LoopDriver] = []

    def run_soon(turn: Callable[[], object]) -> None:
        state: Any = getattr(turn, "__self__", None)
        if NAMES is None or taken or type(state).__name__ != "GuestState":
            loop.call_soon(turn)
            return
        driver = driver_for(loop, state.runner, state.unrolled_run_gen, state.done_callback)
        taken.append(driver)
        driven(driver)
        driver.start()
        loop.call_soon(driver.tick, _NO_EVENTS)

    return run_soon
