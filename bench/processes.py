"""Other processes, as the kernel sees them: who started whom, who has ended, how much memory they have."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from bench.scale import Scale, timed_rates

PATIENCE_SECONDS = 30
"""Who is still there after this counts as never gone."""


def descendants(pid: int) -> set[int]:
    """Return the pids of what a process has started, and of what those have."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread of it, has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found.union(*map(descendants, found))


def wait_for_ends(pidfds: dict[int, int]) -> set[int]:
    """Wait until all of some processes have ended, for as long as there is patience; return those that have not."""
    left = {pidfd: pid for pid, pidfd in pidfds.items()}
    ends = select.poll()
    for pidfd in left:
        ends.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left and (wait := deadline - time.monotonic()) > 0:
        for pidfd, _ in ends.poll(wait * 1e3):
            ends.unregister(pidfd)
            del left[pidfd]
    return set(left.values())


def private_bytes(pid: int) -> int:
    """Return the memory that ends with a process: its pages that no other process has mapped (USS)."""
    return sum(
        bytes_ for name, bytes_ in _sizes(Path(f"/proc/{pid}/smaps_rollup")).items() if name.startswith("Private_")
    )


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process, where a page of several counts as a part for each (PSS): sums are of all."""
    return _sizes(Path(f"/proc/{pid}/smaps_rollup"))["Pss"]


def processor_seconds(pid: int) -> float:
    """Return the processor time that all threads of a process have had."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((tasks / thread / "schedstat").read_text().split()[0]) for thread in os.listdir(tasks)) / 1e9


async def rates_and_costs(
    scale: Scale, work: Callable[[int], Awaitable[object]], count: int
) -> tuple[list[float], list[float]]:
    """Return what `timed_rates` does, and the microseconds of processors that each piece of the work took.

    All that this process and those that it has started compute meanwhile counts, whichever process does it for whom.
    Where other programs run beside, that says more than a rate.
    """
    costs: list[float] = []

    async def measured(pieces: int) -> None:
        everybody = {os.getpid()} | descendants(os.getpid())
        before = {pid: processor_seconds(pid) for pid in everybody}
        await work(pieces)
        costs.append(sum(processor_seconds(pid) - spent for pid, spent in before.items()) / pieces * 1e6)

    rates = await timed_rates(scale, measured, count)
    return rates, costs[1:]


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has mapped and touched (RSS), shared or not."""
    return _sizes(Path(f"/proc/{pid}/status"))["VmRSS"]


def resident_bytes_peak(pid: int) -> int:
    """Return the most of that since `forget_peak`."""
    return _sizes(Path(f"/proc/{pid}/status"))["VmHWM"]


def forget_peak(pid: int) -> None:
    """Let the peak of a process begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many processes computing for a while."""
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _sizes(path: Path) -> dict[str, int]:
    """Return the lines `Name: 12 kB` of a file, in bytes."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words[-1:] == ["kB"]:
            found[name] = int(words[0]) << 10
    return found
