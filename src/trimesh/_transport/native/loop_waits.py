"""Transport hooks around each wait of the Trio loop.

Before the wait: ring the bells of peers, arm the own bell, and spin on it for a while. After it: deliver arrived
messages, so that tasks waiting for them run in the same tick, without a switch to the transport's task.

    AW-1 If tasks can run and messages have just been sent, the transport's task delivers in its turn. So a task started
         before a message was sent has begun when the reply is handled.
    AW-2 The only task of a turn may wait for messages itself while no other can run and no deadline is due: the loop
         would run nothing in between. It does so for `limits.WAIT_HERE_SECONDS`, at most `limits.WAITS_HERE_MAX` times
         within one turn.
    AW-3 While the only task of a turn could go on at once, it may pass checkpoints without a further turn, for
         `limits.SKIP_TURNS_SECONDS` and at most `limits.SKIP_TURNS_MAX` times. Peers are woken at each.

If an asyncio loop drives the run, the waits of that loop count (`LoopDriver`), and its callbacks are among the tasks of
AW-1 and AW-2; AW-3 does not apply.
"""

from __future__ import annotations

import math
import select
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._transport.interface import LinkHandler
from trimesh.config import Settings

if TYPE_CHECKING:
    from trimesh._transport.native.transport import NativeTransport
    from trimesh.aio.driver import LoopDriver


class AroundWait(trio.abc.Instrument):
    """Hooks of one transport in one Trio run.

    Args:
        transport: Its run() is running.
        handler: Receives messages.
        poller: Object that the run waits on; None if unknown.

    Attributes:
        failure: Exception raised here, for the transport's task to raise: Trio would drop this instrument and continue.
    """

    def __init__(self, transport: NativeTransport, handler: LinkHandler, poller: Poller | None) -> None:
        self.failure: BaseException | None = None
        self._transport = transport
        self._handler = handler
        self._context = trio.lowlevel.current_task().context  # tasks that are started there inherit this
        self._before_wait = transport.library.lib.tm_before_wait
        self._has_news = transport.library.lib.tm_has_news
        self._look = transport.look
        self._has_sent = False  # messages were sent since the last wait, and tasks can run
        self._skips_until = -math.inf  # by the clock of the run
        self._left_out = 0  # turns left in which no task waits itself, because the last such wait was in vain
        self._native = poller
        self._loop: LoopDriver | None
        self._is_quiet: Callable[..., bool]
        self._wait_in(None)

    def begin(self) -> None:
        """Register for the waits of the running run, or of the loop that drives it."""
        loop = loop_wait.get()
        self._wait_in(loop)
        if loop is None:
            trio.lowlevel.add_instrument(self)
        else:
            loop.around = self

    def end(self) -> None:
        if self._loop is not None:
            self._loop.around = None
        else:
            trio.lowlevel.remove_instrument(self)

    def _wait_in(self, loop: LoopDriver | None) -> None:
        self._loop = loop
        poller, descriptor = self._native, -1
        if loop is not None:
            descriptor = loop.descriptor
        elif (
            poller is not None and not poller.is_guest
        ):  # a guest run shares its thread with a host loop, which must not be delayed
            descriptor = poller.epoll.fileno()
        # The run, if the tasks of a turn are all that runs and can be counted (AW-3).
        self._runner: Any = None if poller is None or descriptor < 0 or loop is not None else poller.runner
        if poller is None or descriptor < 0 or self._transport.spin_seconds <= 0:
            self._poller, self._is_quiet = -1, _never
            self._spin_seconds = math.inf  # no wait is long enough to spin
        else:
            self._poller, self._is_quiet = descriptor, poller.is_quiet if loop is None else self._is_quiet_in_loop
            self._spin_seconds = self._transport.spin_seconds

    def _is_quiet_in_loop(self, seconds: float, tasks: int = 0) -> bool:
        assert self._native is not None
        assert self._loop is not None
        callbacks = self._loop.waiting()
        if callbacks > tasks or not self._loop.is_quiet(seconds):
            return False
        return self._native.is_quiet(seconds, tasks - callbacks)

    def before_io_wait(self, timeout: float) -> None:
        """Flush messages of this tick; spin if no task can run and no deadline is due meanwhile."""
        transport = self._transport
        transport.skips_left = 0
        if timeout > 0 or self._loop is None or self._loop.waiting() > 1:
            transport.waits_left = 0
        self._has_sent = timeout <= 0 and transport.dirty
        if timeout <= 0:
            if transport.dirty or transport.lending.returned:
                transport.flush()
            return
        if transport.lending.returned:
            transport.lending.give_back()
        transport.dirty = False
        seen = self._before_wait(transport.bus, self._poller if timeout > self._spin_seconds else -1)
        if seen > 0:
            transport.spins[seen] += 1
        elif seen < 0:
            self._fail(lib.error_of(seen, "waiting for messages"))

    def after_io_wait(self, timeout: float) -> None:
        """Deliver arrived messages, or let the transport's task do it (AW-1)."""
        transport = self._transport
        n = 0
        if not self._has_sent:
            if self.failure is not None:
                return
            n = self._look()
            if n:
                self._hand_over(n)
                if self._left_out:
                    self._left_out -= 1
                elif self._is_quiet(limits.WAIT_HERE_SECONDS, 1):
                    transport.waits_left = limits.WAITS_HERE_MAX
        elif self._has_news(transport.bus):
            if self._loop is None:
                transport.wake()
            else:
                self._loop.soon(self.hand_over)
            return
        runner = self._runner
        if runner is not None and (n or timeout <= 0) and len(runner.runq) == 1:
            now = runner.clock.current_time()
            if runner.deadlines.next_deadline() > now + limits.SKIP_TURNS_MARGIN_SECONDS:
                transport.skips_left, self._skips_until = limits.SKIP_TURNS_MAX, now + limits.SKIP_TURNS_SECONDS

    def hand_over(self) -> None:
        """Deliver arrived messages."""
        if self.failure is None and (n := self._look()):
            self._hand_over(n)

    def wait_here(self) -> bool:
        """See `Transport.wait_here` (AW-2)."""
        transport = self._transport
        if not transport.waits_left or not self._is_quiet(limits.WAIT_HERE_SECONDS):
            return False
        if transport.lending.returned:
            transport.lending.give_back()
        transport.dirty = False
        n = transport.wait_for(self._poller)
        if not n:
            transport.waits_left = 0
            self._left_out = limits.TURNS_LEFT_OUT
            return False
        transport.waits_left -= 1
        self._hand_over(n)
        return self.failure is None

    def skip_turn(self) -> bool:
        """See `Transport.skip_turn` (AW-3)."""
        transport, runner = self._transport, self._runner
        now = runner.clock.current_time()
        is_over = now >= self._skips_until or runner.deadlines.next_deadline() <= now
        if is_over or runner.runq or runner.waiting_for_idle:
            transport.skips_left = 0
            return False
        transport.skips_left -= 1
        if transport.dirty or transport.lending.returned:
            transport.flush()
        if _COUNTS_SCHEDULE_POINTS:
            task: Any = trio.lowlevel.current_task()
            task._schedule_points += 1  # noqa: SLF001 - it has no public name
        return True

    def _hand_over(self, n: int) -> None:
        try:
            self._context.run(self._transport.hand_over, self._handler, n)
        except BaseException as error:  # noqa: BLE001 - raised by the transport's task
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._transport.wake()


_COUNTS_SCHEDULE_POINTS: Final = "_schedule_points" in {
    field.name for field in getattr(trio.lowlevel.Task, "__attrs_attrs__", ())
}
"""True if this release of Trio counts schedule points in the attribute known here; see `_count_checkpoint`."""


def _never(seconds: float, tasks: int = 0) -> bool:
    del seconds, tasks
    return False


# ---- poller: the epoll set of the Trio run of this thread, which has no public name ----------------------------------

# It is optional: where a release of Trio keeps it elsewhere, or treats it otherwise, there is none. A run that another
# loop drives waits in that loop; see `LoopDriver`.

loop_wait: Final[trio.lowlevel.RunVar[LoopDriver | None]] = trio.lowlevel.RunVar("trimesh_loop_wait", None)
"""The wait of the loop that drives this run; None for a run that waits itself."""


class Poller(NamedTuple):
    """The epoll set of a run, and its other work.

    Attributes:
        is_guest: True if the run is a guest of another loop.
        runner: The run, if its next work can be inspected; else None.
    """

    epoll: select.epoll
    is_guest: bool
    runner: Any = None

    def is_quiet(self, seconds: float, tasks: int = 0) -> bool:
        """Return whether exactly `tasks` tasks can run, and no deadline is due in the next `seconds`.

        Tasks of the running turn that have not run yet are not counted: the run does not expose them.
        """
        runner = self.runner
        if runner is None or len(runner.runq) != tasks or runner.waiting_for_idle:
            return False
        deadline: float = runner.deadlines.next_deadline()
        return deadline == math.inf or deadline - runner.clock.current_time() > seconds

    @contextmanager
    def waking_for(self, descriptor: int) -> Generator[None]:
        """Wake the run each time that `descriptor` becomes readable, without a task that waits for it."""
        self.epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        try:
            yield
        finally:
            self.epoll.unregister(descriptor)


def poller_of_run() -> Poller | None:
    """Return the poller of the running Trio run, or None if it cannot be used."""
    runner: Any = trio
    for name in ("_core", "_run", "GLOBAL_RUN_CONTEXT", "runner"):
        runner = getattr(runner, name, None)
    io_manager: Any = getattr(runner, "io_manager", None)
    epoll: Any = getattr(io_manager, "_epoll", None)
    # With a `defaultdict` of waiters Trio ignores an event of a descriptor that no task waits for.
    if not isinstance(epoll, select.epoll) or not isinstance(getattr(io_manager, "_registered", None), defaultdict):
        return None
    return Poller(epoll, getattr(runner, "is_guest", True), runner if _says_what_is_next(runner) else None)


def _says_what_is_next(runner: Any) -> bool:
    """Return whether a run has all that `Poller.is_quiet` reads. Clocks of tests do not measure real waits."""
    has_all = all(hasattr(runner, name) for name in ("runq", "waiting_for_idle", "clock"))
    can_tell = hasattr(getattr(runner, "deadlines", None), "next_deadline")
    return has_all and can_tell and type(runner.clock).__name__ == "SystemClock"


# ---- permission to spin on links before the process sleeps -----------------------------------------------------------

# Spinning saves the time that the kernel takes to wake a sleeper on another core, and keeps that core busy meanwhile.
# The native library decides before each sleep (`native/src/links/busy_poll.zig`); here, once, whether it may at all.

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def chosen_spin_seconds(settings: Settings, quota: Path = _QUOTA) -> float:
    """Return the seconds that this process may spin before it sleeps; 0.0 for never.

    Args:
        settings: Settings of this process; `spin = "off"` forbids spinning.
        quota: File with the CPU quota of the control group; below `limits.SPIN_CORES_MIN` cores nothing spins.
    """
    may = settings.spin != "off" and _quota_cores(quota) >= limits.SPIN_CORES_MIN
    return limits.SPIN_SECONDS if may else 0.0


def _quota_cores(quota: Path) -> float:
    """Return the CPU quota of the control group, in cores; infinite if there is none."""
    try:
        allowed, period = quota.read_text().split()
        return int(allowed) / int(period)
    except (OSError, ValueError):  # there is no such file, or it contains "max"
        return float("inf")
