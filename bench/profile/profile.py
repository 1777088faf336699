"""What one side of a workload computes for each item: processor time by part, and the functions with the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.profile.clocks import Clock
from bench.profile.parts import KERNEL, function_of, part_of
from bench.profile.perf import NATIVE, PYTHON
from bench.report import aligned

Stack = tuple[str, ...]
THREADS = "other threads"


@dataclass
class Profile:
    """One side of one workload.

    Attributes:
        items: How many were done while the clocks ran.
        clock: What they counted.
        kinds: Samples of the main thread by perf, taken afterwards; none where perf cannot be had.
        stacks: Samples by py-spy, taken after those.
    """

    items: int
    clock: Clock
    kinds: Counter[str] = field(default_factory=Counter)
    stacks: Counter[Stack] = field(default_factory=Counter)

    def add(self, other: Profile) -> None:
        """Take in another run of the same."""
        self.items += other.items
        self.clock += other.clock
        self.kinds += other.kinds
        self.stacks += other.stacks

    def functions(self, count: int) -> dict[str, float]:
        """Return the functions of Python, and of extensions, with the most, in microseconds an item."""
        _, functions = divided(self.stacks, self.kinds, self.clock.main_us, self.clock.system_share)
        return {name: us / self.items for name, us in functions.most_common(count)}

    def summary(self) -> dict[str, Any]:
        """Return what is kept of it, in microseconds an item."""
        clock, items = self.clock, self.items
        parts, _ = divided(self.stacks, self.kinds, clock.main_us, clock.system_share)
        if clock.others_us:
            parts[THREADS] = clock.others_us
        return {
            "items": items,
            "samples": self.stacks.total(),
            "kernel_samples": self.kinds.total(),
            "cpu_us": round((clock.main_us + clock.others_us) / items, 3),
            "ended_us": round(clock.ended_us / items, 3),
            "faults": round(clock.faults / items, 3),
            "sleeps": round(clock.sleeps / items, 3),
            "parts": {part: round(us / items, 3) for part, us in parts.most_common()},
        }


def divided(
    stacks: Mapping[Stack, int], kinds: Mapping[str, int], cpu_us: float, system_share: float
) -> tuple[Counter[str], Counter[str]]:
    """Divide the processor time of a thread among parts, and what of it is Python's among functions.

    What perf has seen divides it first. Where perf cannot be had, the kernel's share is what the clocks say of it, and
    the native library is one of the parts among which the samples divide what is left.

    Args:
        stacks: Samples of py-spy.
        kinds: Samples of perf; none without it.
        cpu_us: All of it.
        system_share: The kernel's part of that, by the clocks.
    """
    not_divided = {KERNEL, NATIVE} if kinds else {KERNEL}
    by_part: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for stack, count in stacks.items():
        part = part_of(stack)
        if part not in not_divided:
            by_part[part] += count
            by_function[function_of(stack)] += count
    if kinds:
        whole = sum(kinds.values())
        parts = Counter({kind: cpu_us * count / whole for kind, count in kinds.items() if kind != PYTHON})
    else:
        parts = Counter({KERNEL: cpu_us * system_share})
    each = (cpu_us - parts.total()) / max(1, by_part.total())
    parts.update({part: count * each for part, count in by_part.items()})
    return parts, Counter({function: count * each for function, count in by_function.items()})


def text(
    title: str, item: str, summaries: Mapping[str, dict[str, Any]], functions: Mapping[str, Mapping[str, float]]
) -> str:
    """Return the summaries of some sides as tables."""
    found = [title]
    for side, summary in summaries.items():
        whole = summary["cpu_us"]
        head = (
            f"{side}: {whole:,.1f} us of processor time for each {item}; {summary['sleeps']:.2f} sleeps, "
            f"{summary['faults']:.2f} page faults; {summary['items']:,} of them, {summary['samples']:,} samples"
        )
        if summary["ended_us"]:
            head += f"; its children that have ended: {summary['ended_us']:,.0f} us"
        found.append(head)
        for name, values in (("part", summary["parts"]), ("function", functions[side])):
            lines = [(name, f"us for each {item}", "")]
            lines += [(entry, f"{us:,.2f}", f"{us / whole:.1%}") for entry, us in values.items()]
            found.append(aligned(lines, 1))
    return "\n\n".join(found)
