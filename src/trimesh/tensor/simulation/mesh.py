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
    """A mesh without processes: tensors on it have shapes but no values; see `simulate`."""

    def __init__(
        self, owned: SimulatedProcs, region: Region, *, is_reference: bool = False, policy: Policy | None = None
    ) -> None:
        procs: Any = owned
        super().__init__(procs, region, is_reference=is_reference, policy=policy)
        self._procs = owned

    @property
    def name(self) -> str:
        """Name of the simulation."""
        return self._procs.name

    @property
    def _engine(self) -> SimulatedEngine:
        engine = self._procs.engine
        assert isinstance(engine, SimulatedEngine)
        return engine

    def report(self) -> SimulationReport:
        """Return time, memory and traffic of the program since the start of the block, or since `begin_anew`.

        Raises:
            MeshStopped: The block has been left; call this before its end.
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
        """Reset time, traffic, lines and peak memory, so that set-up does not count as part of a step."""
        self._engine.check_open(None)
        self._engine.begin_anew()

    def write_trace(self, path: Path | str) -> None:
        """Write a timeline of the simulated ranks, as a trace file for Perfetto (https://ui.perfetto.dev).

        It has at most `limits.TENSOR_TRACE_EVENTS_MAX` operators and collectives; `otherData` counts the missing ones.
        """
        engine = self._engine
        engine.check_open(None)
        engine.flush()
        names = [(rank, f"{self.name} rank {rank}") for rank in sorted(engine.ranks)]
        with Path(path).open("wb") as file:
            file.writelines(engine.timeline.trace(names))

    def alive(self) -> Self:
        """Return the whole mesh: simulated members never end."""
        return self

    def _seen(self, region: Region) -> Self:
        return type(self)(self._procs, region, policy=self._policy)

    def _check_spawning(self) -> None:
        self._own_members("actors are spawned in processes")

    def _own_members(self, rule: str) -> NoReturn:
        raise RuntimeError(f"{self!r} is simulated and has no processes: {rule}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a simulated mesh cannot be sent or pickled, as it has no processes, got {self!r}")


@contextmanager
def simulate(
    sizes: Mapping[str, int],
    *,
    device: Device | str = "cpu",
    links: Mapping[str, RankLink] | None = None,
    values: float | StandIn | None = None,
) -> Generator[SimulatedMesh]:
    """Run a tensor program without processes, on shapes alone, and estimate its costs on a mesh.

    In the block the mesh replaces one of `spawn_procs`: it can be activated, modules move to it, plans and compiled
    functions work unchanged. One rank of each view is simulated, with the engine's own rules and collectives, because
    all ranks of a view do the same: a mesh of 512 costs as much as one of 2. `mesh.report()` returns seconds on
    `device`, memory, and bytes sent; bytes are exact, seconds are an estimate.

    Args:
        sizes: Sizes of the dimensions of the mesh, host by host: `{"hosts": 64, "gpus": 8}`.
        device: Device of each rank: a name ("h100", "cpu"), or a `Device`.
        links: Links by dimension, in place of the device's links within and between hosts.
        values: Substitutes for fetched values (`fetch`, `.item()`): a number that fills them, or a function of a tensor
            on the device "meta" with their size and dtype. None refuses to fetch.

    Yields:
        The mesh. Its modules may be built on the device "meta", and so be larger than this machine.

    Raises:
        ShapeError: A size is invalid, or `links` names an unknown dimension.
        ValueError: No device has that name.
        RuntimeError: In the block: a value is fetched without substitutes, or an operation needs a process.

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
            raise ShapeError(f"a link must be along a dimension of {region.extent!r}, got {label!r}")
    stand_in = filled_with(values) if isinstance(values, int | float) else values
    procs = SimulatedProcs("simulated", region)
    engine = procs.engine = SimulatedEngine(procs, numbers, links or {}, stand_in)
    try:
        yield SimulatedMesh(procs, region)
        engine.flush()
    finally:
        engine.close()


# ---- `SimulationReport`: the result of a simulation ------------------------------------------------------------------

_LINES_SHOWN = 12
"""Number of program lines in the table of `str`: the most expensive ones."""


@attrs.frozen
class LineCost:
    """Costs on a rank of the operations that one source line has issued.

    Attributes:
        line: `file:line in function`.
        commands: Operations issued there.
        operators: Torch operators that a rank ran for them.
        seconds: Total time of the device, its links and the rank's Python; these overlap if the device is
            asynchronous.
        sent: Bytes that a rank sent in collectives.
    """

    line: str
    commands: int
    operators: int
    seconds: float
    sent: int


@attrs.frozen
class SimulationReport:
    """Estimated costs of a program; `str` formats them as a table.

    Attributes:
        device: The assumed device.
        extent: Sizes of the dimensions of the mesh.
        seconds: Time from the first operation to the end of the last one, on the rank that ends last.
        issue_seconds: Part of it in which the controller is busy issuing; it runs ahead of the ranks.
        peak_bytes: Peak memory of a rank in tensors.
        held_bytes: Current memory of a rank in tensors.
        traffic: Collectives of the first rank, as `await trimesh.tensor.traffic(mesh)` returns them for a mesh with
            processes.
        moved_bytes: Bytes read from ranks of other views (`to_mesh`, stages of pipelines), by the rank that reads most.
        commands: Operations that the controller has issued.
        operators: Torch operators run, on the rank that ran most.
        operations: Arithmetic operations on the same rank.
        lines: Costs of each program line, on the rank where it cost most, most expensive first.
        ranks: Number of ranks that were simulated to represent all.
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
        """Return whether peak memory fits the device."""
        return self.peak_bytes <= self.device.memory_bytes

    def __str__(self) -> str:
        """Format totals, then traffic along each dimension, then the most expensive lines."""
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
    """Return each line once, with its highest cost, most expensive first."""
    by_line: dict[str, LineCost] = {}
    for one in found:
        known = by_line.get(one.line)
        if known is None or one.seconds > known.seconds:
            by_line[one.line] = one
    return tuple(sorted(by_line.values(), key=lambda one: -one.seconds))
