"""`simulate`: a block with a mesh that has no processes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.tensor.controller.trace import shown
from trimesh.tensor.ops.traffic import Collectives, Traffic
from trimesh.tensor.simulation.device import Device, RankLink, device_of
from trimesh.tensor.simulation.engine import SimulatedEngine, StandIn, filled_with
from trimesh.tensor.simulation.process import SimulatedProcs
from trimesh.tensor.simulation.report import LineCost, SimulationReport, dearest

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
