"""`SimulationReport`: what a simulation has counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from trimesh.tensor.ops.traffic import Traffic

if TYPE_CHECKING:
    from trimesh.tensor.simulation.device import Device

_LINES_SHOWN = 12
"""Lines of a program in the table that `str` makes: those that cost most."""


@attrs.frozen
class LineCost:
    """What the operations that one line has issued have cost a rank.

    Attributes:
        line: `file:line in function`.
        commands: Operations that were issued there.
        operators: Operators of torch that a rank ran for them.
        seconds: Of the device, of its links and of the rank's Python; these go on beside each other where the device
            is asynchronous.
        sent: Bytes that a rank has sent in collectives.
    """

    line: str
    commands: int
    operators: int
    seconds: float
    sent: int


@attrs.frozen
class SimulationReport:
    """What a program would take; `str` makes a table of it.

    Attributes:
        device: By whose numbers.
        extent: Sizes of the dimensions of the mesh.
        seconds: From the first operation to the end of the last one on the rank that ends last.
        issue_seconds: Of those, how long the controller would be busy issuing; it runs ahead of the ranks.
        peak_bytes: The most memory that a rank would hold in tensors.
        held_bytes: What it would hold now.
        traffic: What the first rank would have sent in collectives, as `await trimesh.tensor.traffic(mesh)` says it of
            a mesh with processes.
        moved_bytes: What the rank that reads most reads from ranks of other views: `to_mesh`, the stages of pipelines.
        commands: Operations that the controller has issued.
        operators: Operators of torch that the rank has run which has run most.
        operations: Of arithmetic, on the same.
        lines: What each line of the program has cost, on the rank where it cost most, the dearest first.
        ranks: How many ranks were simulated for all.
    """

    device: Device
    extent: Mapping[str, int]
    seconds: float
    issue_seconds: float
    peak_bytes: int
    held_bytes: int
    traffic: Traffic
    moved_bytes: int
    commands: int
    operators: int
    operations: float
    lines: tuple[LineCost, ...]
    ranks: int

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.peak_bytes <= self.device.memory_bytes

    def __str__(self) -> str:
        """Show the sums, then what is sent along each dimension, then the lines that cost most."""
        sizes = " x ".join(f"{label} {size}" for label, size in self.extent.items()) or "one rank"
        left = "" if self.fits else f", MORE than the {self.device.memory_bytes / 1e9:,.1f} GB of a {self.device.name}"
        lines = [
            f"{sizes} of {self.device.name}: {self.seconds * 1e3:,.3f} ms, of which issuing takes "
            f"{self.issue_seconds * 1e3:,.3f} ms",
            f"a rank holds at most {self.peak_bytes / 1e6:,.3f} MB{left}; "
            f"{self.operations / 1e9:,.3f} billion operations in {self.operators:,} operators",
        ]
        sent = dict.fromkeys(one.label for one in self.traffic)
        lines += [f"along {label!r} a rank sends {self.traffic.sent(label):,} bytes" for label in sent]
        if self.moved_bytes:
            lines.append(f"a rank reads {self.moved_bytes:,} bytes from ranks of other views")
        rows = [("ms", "sent bytes", "operators", "line")]
        rows += [
            (f"{one.seconds * 1e3:,.3f}", f"{one.sent:,}", f"{one.operators:,}", one.line)
            for one in self.lines[:_LINES_SHOWN]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines += ["  ".join([*map(str.rjust, row[:3], widths), row[3]]) for row in rows]
        if len(self.lines) > _LINES_SHOWN:
            lines.append(f"and {len(self.lines) - _LINES_SHOWN} lines more")
        return "\n".join(lines)


def dearest(found: Iterable[LineCost]) -> tuple[LineCost, ...]:
    """Return each line once, as it cost most, the dearest first."""
    by_line: dict[str, LineCost] = {}
    for one in found:
        known = by_line.get(one.line)
        if known is None or one.seconds > known.seconds:
            by_line[one.line] = one
    return tuple(sorted(by_line.values(), key=lambda one: -one.seconds))
