"""Kills members of a mesh, and checks that each death, and each restart, is told."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import attrs
import trio

from trimesh import Died, ProcDied, Restarted, Started

WAYS = (signal.SIGKILL,) * 14 + (signal.SIGSEGV, signal.SIGSEGV, signal.SIGABRT, signal.SIGABRT, signal.SIGTERM)
STOP_EVERY = 15
"""One kill in so many is a SIGSTOP, which the lease turns into a death."""

HEAL_SECONDS = 60.0
"""A member that does not serve again by then never will: the longest way is the lease, on a machine that is busy."""


@attrs.define(eq=False)
class Saboteur:
    """Kills members one after the other.

    Attributes:
        chance: Decides who and how.
        living: Pid and incarnation of the members that serve, by rank.
        kills: Signals sent, by name.
        restarts: Members that have come back.
        seconds: From the signal to the restart, for all but stopped members.
    """

    chance: Random
    living: dict[int, tuple[int, int]] = attrs.field(factory=dict[int, tuple[int, int]])
    kills: Counter[str] = attrs.field(factory=Counter[str])
    restarts: int = 0
    seconds: array[float] = attrs.field(factory=lambda: array("d"))
    _struck: dict[int, tuple[signal.Signals, float]] = attrs.field(factory=dict[int, tuple[signal.Signals, float]])
    _news: trio.Event = attrs.field(factory=trio.Event)

    @property
    def count(self) -> int:
        """How many signals were sent."""
        return sum(self.kills.values())

    async def watch(self, mesh: Any, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the events of the mesh; refuse a death that nobody has caused, and one that is told wrongly."""
        async with mesh.events() as events:
            task_status.started()
            async for event in events:
                match event:
                    case Started() | Restarted():
                        self._serves(event)
                    case Died():
                        self._died(event)
                    case _:
                        pass
                self._news.set()
                self._news = trio.Event()

    def _serves(self, event: Started | Restarted) -> None:
        rank = event.point.rank
        self.living[rank] = event.pid, event.incarnation
        if isinstance(event, Restarted):
            self.restarts += 1
            how, at = self._struck.pop(rank)
            if how is not signal.SIGSTOP:
                self.seconds.append(time.monotonic() - at)

    def _died(self, event: Died) -> None:
        rank = event.point.rank
        how, _ = self._struck.get(rank, (None, 0.0))
        error = event.error
        assert isinstance(error, ProcDied), f"{event} is no death of a process"
        expected = signal.SIGKILL if how is signal.SIGSTOP else how
        assert error.signal == expected, f"rank {rank} was sent {how}, and is said to have died by {error}"
        if how is signal.SIGSTOP:
            assert error.reason == "stopped", error

    def strike(self, how: signal.Signals | None = None, rank: int | None = None) -> bool:
        """Send a signal to a member that serves; False when none does."""
        candidates = [one for one in self.living if one not in self._struck] if rank is None else [rank]
        if not candidates:
            return False
        rank = self.chance.choice(sorted(candidates))
        if how is None:
            how = signal.SIGSTOP if self.chance.randrange(STOP_EVERY) == 0 else self.chance.choice(WAYS)
        pid, _ = self.living.pop(rank)
        self._struck[rank] = how, time.monotonic()
        self.kills[how.name] += 1
        os.kill(pid, how)
        return True

    async def healed(self) -> None:
        """Wait until every member that was struck serves again."""
        with trio.fail_after(HEAL_SECONDS):
            while self._struck:
                await self._news.wait()

    async def run(self, every: float, on_kill: Callable[[], None]) -> None:
        """Strike for ever: every so many seconds, or as soon as all is healed when that is 0."""
        while True:
            if every:
                await trio.sleep(every)
            else:
                await self.healed()
                await trio.lowlevel.checkpoint()
            if self.strike(signal.SIGKILL if not every else None):
                on_kill()
