"""`simulate`: a block with a mesh that has no processes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import attrs

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.tensor.controller.trace import shown
from trimesh.tensor.ops.profiling import Collectives, Traffic
from trimesh.tensor.simulation.device import Device, RankLink, device_of
from trimesh.tensor.simulation.engine import SimulatedEngine, StandIn, filled_with
from trimesh.tensor.simulation.kernels import SimulatedProcs

if TYPE_CHECKING:
    from trimesh._supervision.policy import Policy


class SimulatedMesh(ProcMesh):
    """A mesh without processes, on which tensors have shapes and no values; see `simulate`."""

    def __init__(
        self, owned: SimulatedProcs, region: Region, *, is_reference: bool = False, policy: Policy | None = None
    ) -> None:
        procs: Any = owned
        super().__init__(procs, region, is_reference=is_reference, policy=policy)
        self._procs = owned

    @property
    def name(self) -> str:
        """Of the simulation."""
        return self._procs.name

    @property
    def _engine(self) -> SimulatedEngine:
        engine = self._procs.engine
        assert isinstance(engine, SimulatedEngine)
        return engine

    def report(self) -> SimulationReport:
        """Return what the program would take, from the beginning of the block, or from `begin_anew`, up to here.

        Raises:
            MeshStopped: The block has been left: ask before its end.
        """
        engine = self._engine
        engine.check_open(None)
        engine.flush()
        ranks = [engine.ranks[number] for number in sorted(engine.ranks)]
        meters = [one.meter for one in ranks]
        traffic = Traffic(
            Collectives(labels, name, count, sent)
            for one in ranks[:1]
            for labels, named in one.counts.by_labels.items()
            for name, (count, sent) in named.items()
        )
        lines = dearest(
            LineCost(shown(line), totals.commands, totals.operators, totals.seconds, totals.sent)
            for one in meters
            for line, totals in one.lines.items()
        )
        return SimulationReport(
            device=engine.numbers,
            extent=dict(self._procs.whole.extent),
            seconds=max([engine.issued_at, *(one.now for one in meters)]),
            issue_seconds=engine.commands * engine.numbers.issue_seconds,
            peak_bytes=max((one.peak_bytes for one in meters), default=0),
            held_bytes=max((one.held_bytes for one in meters), default=0),
            traffic=traffic,
            moved_bytes=max((one.moved_bytes for one in meters), default=0),
            commands=engine.commands,
            operators=max((one.operators for one in meters), default=0),
            operations=max((one.operations for one in meters), default=0.0),
            lines=lines,
            ranks=len(ranks),
        )

    def begin_anew(self) -> None:
        """Count time, traffic, lines and the peak of memory from here on: what a program does first is not its step."""
        self._engine.check_open(None)
        self._engine.begin_anew()

    def write_trace(self, path: Path | str) -> None:
        """Write what the simulated ranks do when, as a file that Perfetto shows (https://ui.perfetto.dev).

        At most `limits.TENSOR_TRACE_EVENTS_MAX` operators and collectives are in it; `otherData` counts the others.
        """
        engine = self._engine
        engine.check_open(None)
        engine.flush()
        names = [(rank, f"{self.name} rank {rank}") for rank in sorted(engine.ranks)]
        with Path(path).open("wb") as file:
            file.writelines(engine.timeline.trace(names))

    def alive(self) -> Self:
        """Return all: nothing of it lives, and nothing ends."""
        return self

    def _seen(self, region: Region) -> Self:
        return type(self)(self._procs, region, policy=self._policy)

    def _check_spawning(self) -> None:
        self._own_members("actors are spawned in processes")

    def _own_members(self, rule: str) -> NoReturn:
        raise RuntimeError(f"{self!r} is simulated and has no processes: {rule}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is simulated and stays in its block: nothing of it is elsewhere")


@contextmanager
def simulate(
    sizes: Mapping[str, int],
    *,
    device: Device | str = "cpu",
    links: Mapping[str, RankLink] | None = None,
    values: float | StandIn | None = None,
) -> Generator[SimulatedMesh]:
    """Run a program of tensors without processes, on shapes alone, and count what it would take on a mesh.

    In the block the mesh stands where one of `spawn_procs` would: it is activated, modules move to it, plans and
    recorded functions are the same code. One rank of each view is simulated, by the engine's own rules and collectives,
    for all of its ranks do the same: a mesh of 512 costs what one of 2 costs. `mesh.report()` says seconds by the
    numbers of `device`, memory, and bytes sent; bytes are exact, seconds are an estimate.

    Args:
        sizes: Of the dimensions of the mesh, host by host: `{"hosts": 64, "gpus": 8}`.
        device: What each rank has: the name of one ("h100", "cpu"), or its numbers.
        links: What joins the ranks along a dimension, in place of what the device says of a host and its network.
        values: What stands for values that the program asks for (`fetch`, `.item()`): a number that fills them, or a
            function of a tensor that has size and dtype and is on the device "meta". None refuses them.

    Yields:
        The mesh. Its modules may be built on the device "meta", and so be larger than this machine.

    Raises:
        ShapeError: A size is none, or `links` names no dimension.
        ValueError: There is no device of that name.
        RuntimeError: In the block: a value is asked for, or something that needs a process.

    Blocking: no checkpoint. Works in Trio and outside of it.

    Example:
        >>> with trimesh.tensor.simulate({"gpus": 512}, device="h100") as mesh:
        ...     train(mesh)
        ...     print(mesh.report())
    """
    numbers = device_of(device)
    region = Region(Extent(sizes), mesh=0)
    for label in links or {}:
        if label not in region.extent:
            raise ShapeError(f"a link joins the ranks along a dimension of {region.extent!r}, got {label!r}")
    stand_in = filled_with(values) if isinstance(values, int | float) else values
    procs = SimulatedProcs("simulated", region)
    engine = procs.engine = SimulatedEngine(procs, numbers, links or {}, stand_in)
    try:
        yield SimulatedMesh(procs, region)
        engine.flush()
    finally:
        engine.close()


# ---- `SimulationReport`: what a simulation has counted ---------------------------------------------------------------

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
