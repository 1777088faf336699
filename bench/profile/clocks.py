"""What the kernel has counted of other processes' threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Clock:
    """Counts since the start of a process, or of what happened between two readings.

    Attributes:
        main_us: Processor time of its main thread.
        others_us: Of its other threads that live.
        ended_us: Of its children that have ended and were reaped, to 10 ms.
        user_ticks, system_ticks: In which mode the timer has found the main thread.
        faults: Page faults of the main thread that read nothing from a disk.
        sleeps: How often the main thread has slept.
    """

    main_us: float
    others_us: float
    ended_us: float
    user_ticks: int
    system_ticks: int
    faults: int
    sleeps: int

    @property
    def system_share(self) -> float:
        """Return the part of the main thread's time that it was in the kernel."""
        ticks = self.user_ticks + self.system_ticks
        return self.system_ticks / ticks if ticks else 0.0

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Clock)))

    def __sub__(self, earlier: Clock) -> Clock:
        return Clock(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(Clock)))


def read_clock(pid: int) -> Clock:
    """Return what a process has used so far."""
    process = Path(f"/proc/{pid}")
    stat = _stat(process / "task" / str(pid) / "stat")
    times = {thread: _run_us(process / "task" / thread) for thread in os.listdir(process / "task")}
    main_us = times.pop(str(pid))
    children = _stat(process / "stat")
    return Clock(
        main_us=main_us,
        others_us=sum(times.values()),
        ended_us=(children[13] + children[14]) * 1e6 / TICKS_PER_SECOND,
        user_ticks=stat[11],
        system_ticks=stat[12],
        faults=stat[7],
        sleeps=_sleeps(process / "task" / str(pid) / "status"),
    )


def _run_us(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e3
    except FileNotFoundError:  # it has ended meanwhile
        return 0.0


def _stat(path: Path) -> list[int]:
    """Return the fields of a `stat` file that follow the state, which is the third; the second may have blanks."""
    words = path.read_text().rpartition(")")[2].split()
    return [0, *map(int, words[1:])]


def _sleeps(path: Path) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines["voluntary_ctxt_switches"])
