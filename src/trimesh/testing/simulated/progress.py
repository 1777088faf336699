"""Whether a simulated run gets anywhere: its steps are bounded, in all and at one moment of the virtual clock.

a wait for nothing           the clock jumps to `HANG_SECONDS`
the same beside heartbeats   the clock goes on by little; the steps run out
a task that never waits      the clock stands still; after many steps it goes on to the next deadline, as in real time
                             it would, until there is none or the steps run out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import trio
import trio.testing

from trimesh._runtime.life.current import proc_in
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.watch.task_tree import describe_actors
from trimesh.testing.simulated.host import World

STEPS_MAX: Final = 500_000
"""Steps of tasks after which a simulated run counts as hanging: some ten seconds of real time, and many times what a
long test has. Heartbeats, which let the clock go on for ever, are ended by it."""

HANG_SECONDS: Final = 100_000.0
"""Virtual time after which a run that has not ended hangs: a day. What polls runs out of steps before."""

SPIN_STEPS_MAX: Final = 100_000
"""Steps of tasks at one moment of the virtual clock, which a task that never waits keeps from going on by itself."""

SPIN_AGAIN_STEPS: Final = 1_000
"""The same once that has happened, until all tasks wait."""

_SAMPLE: Final = 64
"""One step of so many is looked at for who makes them."""

_BUSIEST: Final = 3
"""Tasks that are named as those that make most steps."""


class Progress(trio.abc.Instrument):
    """Counts the steps of one run; an instrument of its Trio run.

    Attributes:
        steps_max: Steps that the run may have.
        stuck: Why it counts as hanging, or "" as long as it does not.
        is_stuck: Set then.
    """

    def __init__(self, steps_max: int = STEPS_MAX) -> None:
        self.steps_max = steps_max
        self.stuck = ""
        self.is_stuck = trio.Event()
        self._steps = 0
        self._moment = -1.0
        self._moment_began = 0
        self._spin_steps = SPIN_STEPS_MAX
        self._jumped = False
        self._makers: Counter[tuple[int, str]] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step; every now and then, look at what they come to."""
        self._steps += 1
        if self._steps % _SAMPLE:
            return
        proc = proc_in(task.context)
        self._makers[0 if proc is None else proc.proc_id, task.name] += 1
        now = trio.current_time()
        if now != self._moment:
            self._moment, self._moment_began = now, self._steps
            self._spin_steps = SPIN_AGAIN_STEPS if self._jumped else SPIN_STEPS_MAX
            self._jumped = False
            if self._steps > self.steps_max:
                self._stick(f"after {self._steps:,} steps of its tasks, in {now:g} virtual seconds")
        elif self._steps - self._moment_began > self._spin_steps and not self._jumped:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Let the clock come to the next deadline, as it does in real time beside a task that never waits."""
        seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if now + seconds < HANG_SECONDS:
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.jump(max(seconds, 0.0))
            self._jumped = True
        else:
            steps = self._steps - self._moment_began
            self._stick(
                f"after {steps:,} steps at one moment of the virtual clock ({now:g} s), with no deadline to come"
            )

    def _stick(self, why: str) -> None:
        if not self.stuck:
            self.stuck = why
            self.is_stuck.set()

    def busiest(self, world: World) -> Iterator[str]:
        """Yield lines on the tasks that made most of the steps."""
        for (number, name), count in self._makers.most_common(_BUSIEST):
            label = next((child.label for proc_id, child in world.children.items() if proc_id == number), "controller")
            yield f"  {count * _SAMPLE:,} steps: {name} of {label}"


def what_it_waits_for(world: World) -> Iterator[str]:
    """Yield lines on every living process: its calls that have not ended, and what its actors do."""
    for label, proc in world.living():
        lines = [*_calls(proc), *describe_actors(proc)]
        if lines:
            yield f"{label}:"
            yield from (f"  {line}" for line in lines)


def _calls(proc: Proc) -> Iterator[str]:
    for call in proc.unended_calls():
        yield f"waits for {call.what}, called {proc.now() - call.started_at:.1f} s ago"
