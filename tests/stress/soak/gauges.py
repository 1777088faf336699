"""What processes hold, as /proc shows it, and whether it grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Held:
    """What one process holds.

    Attributes:
        fds: Open descriptors.
        memfds: Those of them that are shared memory without a name.
        maps: Mappings of such memory.
        threads: Of any kind.
    """

    fds: int
    memfds: int
    maps: int
    threads: int


def held(pid: int) -> Held:
    """Return what a process holds now."""
    links = [_target(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Held(
        fds=sum(bool(link) for link in links),
        memfds=sum(link.startswith("/memfd:") for link in links),
        maps=sum("/memfd:" in line for line in maps),
        threads=len(os.listdir(f"/proc/{pid}/task")),
    )


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # the descriptor of the directory that is being read
        return ""


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the line that fits some points best, by least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def holdings() -> dict[str, Held]:
    """Return what the controller and its spawners hold."""
    gc.collect()
    pids = [os.getpid(), *children(os.getpid())]
    return {("controller" if pid == os.getpid() else f"child {pid}"): held(pid) for pid in pids}


def changes(before: dict[str, Held], now: dict[str, Held]) -> list[str]:
    """Return a line for each process that does not hold what it held before."""
    return [
        f"{name} holds {now.get(name)}, before it was {one}" for name, one in before.items() if now.get(name) != one
    ]
