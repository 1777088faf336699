"""`profile`: one trace of operations issued by the controller and executed by the ranks; `traffic`; `fallbacks`.

PY-1 Without a profile, operations do not pass through this module: teams change their class only while they are
     profiled.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from trimesh import limits
from trimesh._runtime.tasks import in_trio
from trimesh._transport.native.carriers import boot_id
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import place_name
from trimesh.tensor.controller import shapes
from trimesh.tensor.controller.engine import Engine, answers
from trimesh.tensor.controller.team import Team, call_kernel, issuing_line
from trimesh.tensor.controller.trace import named, shown, span, trace_bytes, track
from trimesh.tensor.session.opening import team_of

if TYPE_CHECKING:
    from trimesh.tensor.controller.shapes import Line, Plan


_PINGS: Final = 3
"""Requests to measure the clock offset of another machine; the fastest reply counts."""

_PROFILED: Final[dict[int, Profile]] = {}
"""Active profiles by the `id` of their engine."""


class _ProfiledTeam(Team):
    """A team whose commands are profiled."""

    __slots__ = ()

    def emit(self, plan: Plan, operands: Sequence[Any], outputs: int) -> int:
        number, begun = self.issued, time.monotonic_ns()
        first = super().emit(plan, operands, outputs)
        _PROFILED[id(self.engine)].issued(self, number, plan.name, begun)
        return first

    def emit_words(self, *words: Any) -> None:
        """Add a command other than an operation; see `Team.emit_words`."""
        number, begun = self.issued, time.monotonic_ns()
        super().emit_words(*words)
        _PROFILED[id(self.engine)].issued(self, number, "recorded", begun)


@attrs.define(eq=False)
class Profile:
    """Events of a mesh in a block of `profile`; `write` saves them when the block has ended.

    Attributes:
        missing: Events dropped beyond `limits.TENSOR_PROFILE_EVENTS_MAX` of a process.
        uncertainty_seconds: Uncertainty of clock offsets: 0 between processes of one machine, half of the fastest
            round trip to another one.
        own_joining: The engine's own callback for new teams.
    """

    missing: int = 0
    uncertainty_seconds: float = 0.0
    own_joining: Callable[[Team], None] | None = None
    _name: str = ""
    _begun: int = 0
    _lines: dict[tuple[int, int], tuple[str, Line, int, int]] = attrs.field(factory=dict)
    _ranks: list[tuple[str, list[str], list[list[int]], int]] = attrs.field(factory=list)

    def issued(self, team: Team, number: int, name: str, begun: int) -> None:
        """Record a command that the controller has issued."""
        if len(self._lines) >= limits.TENSOR_PROFILE_EVENTS_MAX:
            self.missing += 1
            return
        self._lines[team.number, number] = (name, issuing_line(), begun, time.monotonic_ns() - begun)

    def done(self, name: str, names: list[str], rows: list[list[int]], missing: int, offset: int) -> None:
        """Record the events of a rank; its clock is ahead of the one here by `offset` nanoseconds."""
        self.missing += missing
        self._ranks.append((name, names, rows, offset))

    def write(self, path: Path | str) -> None:
        """Write a trace file for Perfetto (https://ui.perfetto.dev).

        The controller and each rank are processes in it. Operations are named by the source line that issued them,
        `train.py:12 aten::mm`, with the full location as an argument. Collectives have a track of their own. Times
        count from the start of the block.
        """
        other = {"missing": self.missing, "uncertainty_us": self.uncertainty_seconds * 1e6}
        with Path(path).open("wb") as file:
            file.writelines(trace_bytes(self._events(), other))

    def _events(self) -> Iterator[dict[str, Any]]:
        yield from track(1, 1, f"controller of {self._name}", ("issued",))
        for number, (name, *_) in enumerate(self._ranks, start=2):
            yield from track(number, 1, name, ("operations", "collectives"))
        for name, line, begun, took in self._lines.values():
            yield self._span(1, 1, "issued", name, line, begun, took)
        for number, (_, names, rows, offset) in enumerate(self._ranks, start=2):
            for kind, index, team, command, begun, took, sent in rows:
                by = self._lines.get((team, command), (None, None))[1]
                if kind:
                    yield self._span(number, 2, "collective", names[index], by, begun - offset, took, sent_bytes=sent)
                else:
                    yield self._span(number, 1, "operation", names[index], by, begun - offset, took)

    def _span(
        self, process: int, thread: int, kind: str, name: str, line: Line | None, begun: int, took: int, **more: int
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(more) if line is None else {"line": shown(line), **more}
        return span(process, thread, kind, named(name, line), (begun - self._begun) / 1e9, took / 1e9, arguments)


@asynccontextmanager
async def profile(mesh: ProcMesh, path: Path | str | None = None) -> AsyncGenerator[Profile]:
    """Profile the operations of a mesh in a block, and write a trace.

    The trace has issue and execution on one clock. Operations are named by the source line that issued them;
    collectives have the bytes that they send. Profiling costs a few microseconds for each operation, and nothing
    outside of the block. Processes of one machine share a clock; the offset of another one's clock is measured by
    round trips, and the trace states its uncertainty.

    Args:
        mesh: The processes, or a view of them. Operations on all views of the mesh are recorded, on this view's ranks.
        path: File to write when the block is left. None: call `profile.write(path)` afterwards.

    Yields:
        The `Profile`.

    Raises:
        RuntimeError: The mesh is profiled already; or it is a reference, or `this_proc()`.
        MeshErrorGroup: A process has ended.

    Blocking: entering and leaving are checkpoints, cancellable; leaving waits until the ranks have done what was
    issued.

    Example:
        >>> async with trimesh.tensor.profile(procs, "step.json"):
        ...     step(batch)
    """
    team = team_of(mesh, "a profile is of")
    engine, found = team.engine, Profile()
    if id(engine) in _PROFILED:
        raise RuntimeError(f"{engine.name} is profiled already, in a block that has not ended: leave that first")
    found._name = engine.name
    call_kernel(team, "profile_begin")
    offsets = await in_trio(_clocks)(team, found)
    found._begun = time.monotonic_ns()
    _look(engine, found)
    try:
        yield found
    finally:
        _look_away(engine)
        await in_trio(_take)(team, found, offsets)
    if path is not None:
        found.write(path)


def _look(engine: Engine, found: Profile) -> None:
    _PROFILED[id(engine)] = found
    for one in engine.teams:
        one.__class__ = _ProfiledTeam
    own = engine.on_team

    def joined(team: Team) -> None:
        team.__class__ = _ProfiledTeam
        own(team)

    found.own_joining = own
    engine.on_team = joined


def _look_away(engine: Engine) -> None:
    found = _PROFILED.pop(id(engine))
    if found.own_joining is not None:
        engine.on_team = found.own_joining
    for one in engine.teams:
        one.__class__ = Team


async def _clocks(team: Team, found: Profile) -> list[int]:
    """Return the offset of each rank's clock to the one here, in nanoseconds (positive: ahead)."""
    places = range(len(team.peers))
    best = [(0.0, 0)] * len(places)
    for ping in range(_PINGS):
        asked = time.monotonic_ns()
        request = team.engine.ask(team, places, lambda number: call_kernel(team, "profile_clock", number), shapes.CLOCK)
        told = await answers(request)
        now = time.monotonic_ns()
        for place in places:
            boot, at = told[place]
            if boot == boot_id():
                best[place] = (0.0, 0)
            elif not ping or (now - asked) / 2 < best[place][0]:
                best[place] = ((now - asked) / 2, at - (asked + now) // 2)
    found.uncertainty_seconds = max(half for half, _ in best) / 1e9
    return [offset for _, offset in best]


async def _take(team: Team, found: Profile, offsets: Sequence[int]) -> None:
    places = range(len(team.peers))
    request = team.engine.ask(team, places, lambda number: call_kernel(team, "profile_end", number), shapes.PROFILE)
    told = await answers(request)
    for place, origin in zip(places, team.origins, strict=True):
        names, rows, missing = told[place]
        found.done(place_name(team.engine.name, origin.point), names, rows.tolist(), missing, offsets[place])


# ---- traffic of collectives between the ranks of a mesh --------------------------------------------------------------


@attrs.frozen
class Collectives:
    """Collectives of one kind along one dimension of a mesh.

    Attributes:
        label: The dimension; several with commas between them.
        name: Name of the method of torch's process groups: `"allreduce"`, `"_allgather_base"`.
        count: How many.
        sent: Bytes that the first rank has sent in them, counted as rings: B (n - 1) / n for an all-gather or a
            reduce-scatter of B bytes among n ranks, twice that for an all-reduce.
    """

    label: str
    name: str
    count: int
    sent: int


class Traffic(tuple[Collectives, ...]):
    """Collectives of the first rank of a mesh since its start; `sent` sums their bytes."""

    __slots__ = ()

    def sent(self, label: str | None = None) -> int:
        """Return the bytes sent along one dimension of the mesh, or along all."""
        return sum(one.sent for one in self if label in (None, one.label))


async def traffic(mesh: ProcMesh) -> Traffic:
    """Return the collectives that the first rank of a mesh took part in, and the bytes that it has sent, so far.

    Includes collectives of global tensors, of `reduce` and of remote functions with a process group. Tensors that
    `to_mesh` and `fetch` move are read from memory, and not counted. Take the difference of two calls around a step.

    Args:
        mesh: The processes. Counts start with the first of them.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> (await trimesh.tensor.traffic(procs)).sent("dp")
        1288
    """
    team = team_of(mesh, "collectives are counted on")
    found: Traffic = await in_trio(_asked)(team)
    return found


async def _asked(team: Team) -> Traffic:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "traffic", number), shapes.TRAFFIC)
    return Traffic(Collectives(*one) for one in (await answers(request))[0])


# ---- operators without a rule, which fell back to whole tensors ------------------------------------------------------


class Fallbacks(dict[str, int]):
    """Number of fallbacks to whole tensors, by operator name.

    Attributes:
        operators: Number of all operators on global tensors.
    """

    def __init__(self, found: dict[str, int], operators: int) -> None:
        super().__init__(found)
        self.operators = operators


async def fallbacks(mesh: ProcMesh) -> Fallbacks:
    """Return the operators on global tensors that had no rule for parts, and how often they ran.

    Such operators gather their arguments, compute the whole on every rank, and cut the results: correct but slow. Calls
    with replicated arguments only are not counted.

    Args:
        mesh: The processes; the first is queried, as all run the same operators. Counts start with that process.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> await trimesh.tensor.fallbacks(procs)
        {'aten::_linalg_eigh': 1}
    """
    team = team_of(mesh, "the operators without a rule are asked of")
    found: Fallbacks = await in_trio(_asked_fallbacks)(team)
    return found


async def _asked_fallbacks(team: Team) -> Fallbacks:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "fallbacks", number), shapes.FALLBACKS)
    found: tuple[Any, Any] = (await answers(request))[0]
    return Fallbacks(*found)
